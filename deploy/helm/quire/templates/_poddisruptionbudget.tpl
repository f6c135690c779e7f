{{- define "quire.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "quire.name" . }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  {{- if eq .Values.workload "ray" }}
  # Kubernetes does not know how many pods a RayCluster should have.
  minAvailable: {{ sub (int .Values.hosts) 1 }}
  {{- else }}
  maxUnavailable: 1
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
{{- end }}
