{{- define "quire.flags" -}}
{{- $config := deepCopy .Values.config }}
{{- if eq .Values.workload "statefulSet" }}{{ $_ := set $config "nnodes" .Values.hosts }}{{ end }}
{{- toYaml $config }}
{{- end }}

{{- define "quire.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "quire.name" . }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
data:
  quire.yaml: |
    {{- include "quire.flags" . | nindent 4 }}
{{- end }}
