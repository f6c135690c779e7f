{{- define "quire.autoscaling" -}}
{{- with .Values.autoscaling }}
{{- if .by }}
{{- $name := include "quire.name" $ }}
{{- $target := dict "deployment" (list "apps/v1" "Deployment" $name) "leaderWorkerSet" (list "leaderworkerset.x-k8s.io/v1" "LeaderWorkerSet" (printf "%s-group" $name)) }}
{{- if eq .by "keda" }}{{ $_ := set $target "replicas" (list "apps/v1" "StatefulSet" (printf "%s-replica" $name)) }}{{ end }}
{{- $target = get $target $.Values.workload | default list }}
{{- if not $target }}{{ fail (printf "autoscaling.by: %s does not scale workload: %s" .by $.Values.workload) }}{{ end }}
{{- if eq .by "keda" }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
{{- else }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
{{- end }}
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" $ | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: {{ index $target 0 }}
    kind: {{ index $target 1 }}
    name: {{ index $target 2 }}
  {{- if eq .by "keda" }}
  minReplicaCount: {{ .minReplicas }}
  maxReplicaCount: {{ .maxReplicas }}
  pollingInterval: 15
  {{- if include "quire.scalesToZero" $ }}
  cooldownPeriod: {{ .cooldownPeriod }}
  {{- end }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- include "quire.scaling" . | nindent 8 }}
  triggers:
    - type: prometheus
      metadata:
        serverAddress: {{ .prometheus }}
        query: sum(quire:num_requests_waiting{namespace="{{ $.Release.Namespace }}",service="{{ $name }}"})
        threshold: {{ .waitingRequests | quote }}
    - type: prometheus
      metadata:
        serverAddress: {{ .prometheus }}
        query: sum(quire:kv_cache_usage_perc{namespace="{{ $.Release.Namespace }}",service="{{ $name }}"})
        threshold: {{ .kvCacheUsage | quote }}
    {{- if include "quire.scalesToZero" $ }}
        # Blocks in use are no reason to stay.
        activationThreshold: {{ .maxReplicas | quote }}
    - type: external-push
      metadata:
        scalerAddress: {{ .scaler }}
        interceptorRoute: {{ $name }}
    {{- end }}
  {{- else }}
  minReplicas: {{ .minReplicas }}
  maxReplicas: {{ .maxReplicas }}
  metrics:
    - type: Pods
      pods:
        metric:
          name: quire_num_requests_waiting
        target:
          type: AverageValue
          averageValue: {{ .waitingRequests | quote }}
    - type: Pods
      pods:
        metric:
          name: quire_kv_cache_usage_perc
        target:
          type: AverageValue
          averageValue: {{ mulf .kvCacheUsage 1000 | int }}m
  behavior:
    {{- include "quire.scaling" . | nindent 4 }}
  {{- end }}
{{- if include "quire.scalesToZero" $ }}
---
apiVersion: http.keda.sh/v1beta1
kind: InterceptorRoute
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" $ | nindent 4 }}
spec:
  target:
    service: {{ $name }}
    portName: http
  rules:
    - hosts:
        - {{ include "quire.interceptedHost" $ }}
  scalingMetric:
    concurrency:
      targetValue: {{ .concurrency }}
  # A request waits until the model is loaded, and its answer may take long.
  timeouts:
    readiness: 0s
    request: 0s
    responseHeader: 0s
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The name by which KEDA's interceptor knows a server. */}}
{{- define "quire.interceptedHost" -}}
{{ printf "%s.%s" (include "quire.name" .) .Release.Namespace }}
{{- end }}

{{- define "quire.interceptorNamespace" -}}
{{ index (splitList "." (first (splitList ":" .Values.autoscaling.interceptor))) 1 }}
{{- end }}

{{- define "quire.scaling" -}}
scaleDown:
  stabilizationWindowSeconds: 600
  policies:
    - type: Pods
      value: 1
      periodSeconds: 120
{{- end }}
