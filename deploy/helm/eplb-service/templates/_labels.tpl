{{- define "eplb.selector" -}}
app.kubernetes.io/name: eplb-service
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "eplb.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
