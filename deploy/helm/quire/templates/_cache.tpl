{{- define "quire.cache" -}}
{{- if and .Values.cache.size (not .Values.cache.existingClaim) }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "quire.cacheClaim" . }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  accessModes:
    {{- toYaml .Values.cache.accessModes | nindent 4 }}
  {{- with .Values.cache.storageClassName }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ .Values.cache.size }}
{{- end }}
{{- end }}
