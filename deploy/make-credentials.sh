#!/usr/bin/env bash
# Create a CA, the service's certificate, one token per role, and a Grafana password, for a trial or a small site:
#   deploy/make-credentials.sh DIRECTORY HOST...
# Each HOST is a name at which agents and operators reach the service. The script keeps existing files in DIRECTORY. To
# renew one of them, remove it and run the script again. Larger sites use their own CA and credentials.
set -euo pipefail
folder=${1:?usage: make-credentials.sh DIRECTORY HOST...}
shift
umask 077
mkdir -p "$folder"
cd "$folder"
names=$(printf 'DNS:%s,' localhost "$@")IP:127.0.0.1

if [ ! -e ca.pem ]; then
    openssl req -x509 -newkey rsa:3072 -nodes -days 3650 -subj "/CN=eplb authority" \
        -addext basicConstraints=critical,CA:TRUE -keyout ca.key -out ca.pem 2>/dev/null
fi
if [ ! -e tls.crt ]; then
    openssl req -newkey rsa:3072 -nodes -subj "/CN=eplb" -keyout tls.key -out tls.csr 2>/dev/null
    printf 'subjectAltName=%s\n' "$names" >tls.ext
    openssl x509 -req -in tls.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -extfile tls.ext -out tls.crt \
        2>/dev/null
    rm tls.csr tls.ext
fi
if [ ! -e credentials.yaml ]; then
    for role in agent operator reader; do
        openssl rand -hex 32 | tr -d '\n' >$role.token
        digest=$(openssl dgst -sha256 -r $role.token | cut -d' ' -f1)
        printf -- "- name: %s\n  role: %s\n  deployments: ['*']\n  token_sha256: %s\n" $role $role "$digest"
    done >credentials.yaml.new
    mv credentials.yaml.new credentials.yaml
fi
if [ ! -e grafana.password ]; then
    openssl rand -hex 16 | tr -d '\n' >grafana.password
fi
# Containers run as other users and mount these files one by one, so every user may read them. On this host, the
# directory protects them, because only its owner can enter it.
chmod 0444 ca.pem tls.crt tls.key credentials.yaml grafana.password ./*.token
