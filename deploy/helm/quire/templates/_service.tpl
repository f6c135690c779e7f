{{- define "quire.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "quire.name" . }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
    # The job of its metrics, which the alerts and dashboards select.
    app.kubernetes.io/part-of: quire
  {{- if not .model }}
  {{- with .Values.service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
spec:
  {{- if .model }}
  # The router balances the load over the pods.
  clusterIP: None
  {{- else }}
  type: {{ .Values.service.type }}
  {{- end }}
  selector:
    {{- include "quire.selector" . | nindent 4 }}
    app.kubernetes.io/component: server
  ports:
    - name: http
      port: {{ if .model }}{{ include "quire.port" . }}{{ else }}{{ .Values.service.port }}{{ end }}
      targetPort: http
      appProtocol: {{ include "quire.scheme" . }}
{{- end }}
