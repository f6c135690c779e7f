{{- define "quire.serviceMonitor" -}}
{{- if .Values.monitoring.enabled }}
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ include "quire.name" . }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
    {{- with .Values.monitoring.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  # As job: quire, whatever the release's name.
  jobLabel: app.kubernetes.io/part-of
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
  endpoints:
    - port: http
      path: /metrics
      {{- if eq (include "quire.scheme" .) "https" }}
      scheme: https
      tlsConfig:
        {{- toYaml .Values.monitoring.tlsConfig | nindent 8 }}
      {{- end }}
      interval: {{ .Values.monitoring.interval }}
      {{- if not .Values.gateway.enabled }}
      authorization:
        credentials:
          name: {{ .Values.secret }}
          key: metrics-key
      {{- end }}
{{- end }}
{{- end }}
