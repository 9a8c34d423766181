{{- define "fedloom.name" -}}
{{- printf "%s-%s" .Release.Name .Values.role | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "fedloom.labels" -}}
app.kubernetes.io/name: fedloom
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.role }}
{{- end -}}

{{- define "fedloom.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "fedloom.folder" -}}
/var/lib/fedloom/{{ .Values.folder | default .Values.role }}
{{- end -}}

{{- define "fedloom.probe" -}}
exec:
  command:
    - python
    - -c
    - import urllib.request as u; u.urlopen('http://127.0.0.1:{{ .Values.health.port }}/healthz', timeout=8)
timeoutSeconds: 10
{{- end -}}
