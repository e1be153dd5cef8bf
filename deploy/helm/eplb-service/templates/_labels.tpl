{{- define "eplb.selector" -}}
app.kubernetes.io/name: eplb-service
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "eplb.account" -}}
{{- .Values.serviceAccount.name | default .Release.Name -}}
{{- end }}
