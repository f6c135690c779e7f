{{- define "quire.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-quire" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ include "quire.name" . }}
{{- end }}

{{- define "quire.chartLabels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
{{ include "quire.chartLabels" . }}
{{- end }}

{{- define "quire.config" -}}
{{- $config := deepCopy .Values.config }}
{{- if eq .Values.workload "statefulSet" }}{{ $_ := set $config "nnodes" .Values.hosts }}{{ end }}
{{- toYaml $config }}
{{- end }}

{{- define "quire.drainSeconds" -}}
{{ index .Values.config "shutdown-timeout" | int }}
{{- end }}

{{- define "quire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}

{{- define "quire.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- /* Resources of a host, with its GPUs. */}}
{{- define "quire.hostResources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if .Values.gpus }}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" (toString .Values.gpus)) (default (dict) $resources.limits)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- /* Environment variables: a YAML list, from their names. */}}
{{- define "quire.env" -}}
{{- range .names }}
{{- if eq . "QUIRE_API_KEY" }}
- name: QUIRE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $.root.Values.secret }}
      key: metrics-key
{{- else if eq . "POD_INDEX" }}
- name: POD_INDEX
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
{{- else if eq . "RAY_AUTH" }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $.root.Values.secret }}
      key: cluster-token
{{- else if eq . "RAY_ADDRESS" }}
- name: RAY_ADDRESS
  value: $(POD_IP):6379
{{- else }}
- name: {{ . }}
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- end }}
{{- end }}

{{- /*
A container of the image. Arguments: root, name (quire or ray), args, env (names), api (has the HTTP API), port (of a
Ray container), preStop (seconds; 0: none), secrets (uses the Secret's files), resources (YAML).
*/}}
{{- define "quire.container" -}}
name: {{ .name }}
{{ include "quire.image" .root }}
{{- with .args }}
args:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (include "quire.env" (dict "root" .root "names" .env)) }}
env:
  {{- . | nindent 2 }}
{{- end }}
{{- if .api }}
ports:
  - name: http
    containerPort: 8000
# Until the model is loaded: up to an hour.
startupProbe:
  httpGet:
    path: /health/ready
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 720
readinessProbe:
  httpGet:
    path: /health/ready
    port: http
  periodSeconds: 2
  timeoutSeconds: 5
# Not /health, which fails while the engine restarts by itself.
livenessProbe:
  httpGet:
    path: /health/live
    port: http
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- else if .port }}
startupProbe:
  tcpSocket:
    port: {{ .port }}
  periodSeconds: 5
  failureThreshold: 60
readinessProbe:
  tcpSocket:
    port: {{ .port }}
  periodSeconds: 10
livenessProbe:
  tcpSocket:
    port: {{ .port }}
  periodSeconds: 10
  failureThreshold: 6
{{- end }}
{{- if .preStop }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .preStop }}
{{- end }}
resources:
  {{- .resources | nindent 2 }}
securityContext:
  {{- include "quire.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- if eq .name "quire" }}
  - name: config
    mountPath: /etc/quire
    readOnly: true
  {{- if .secrets }}
  - name: secrets
    mountPath: /run/secrets/quire
    readOnly: true
  {{- end }}
  {{- end }}
  - name: models
    mountPath: /models
    readOnly: true
  - name: cache
    mountPath: /cache
  - name: tmp
    mountPath: /tmp
  - name: shm
    mountPath: /dev/shm
{{- end }}

{{- /*
A pod template. Arguments: root, component, containers (a list of arguments of quire.container), grace (seconds),
shareProcessNamespace.
*/}}
{{- define "quire.podTemplate" -}}
{{- $values := .root.Values }}
{{- $files := false }}{{ $secrets := false }}
{{- range .containers }}
{{- if eq .name "quire" }}{{ $files = true }}{{ end }}
{{- if .secrets }}{{ $secrets = true }}{{ end }}
{{- end }}
metadata:
  labels:
    {{- include "quire.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "quire.config" .root | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if .shareProcessNamespace }}
  # Ray looks for the processes that use it, such as the server.
  shareProcessNamespace: true
  {{- end }}
  terminationGracePeriodSeconds: {{ .grace }}
  securityContext:
    {{- include "quire.podSecurity" . | nindent 4 }}
  {{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with (index $values $key) }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    {{- range .containers }}
    - {{- include "quire.container" . | nindent 6 }}
    {{- end }}
  volumes:
    {{- if $files }}
    - name: config
      configMap:
        name: {{ include "quire.name" .root }}
    {{- end }}
    {{- if $secrets }}
    - name: secrets
      secret:
        secretName: {{ $values.secret }}
        defaultMode: 288 # 0440
    {{- end }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ include "quire.claim" .root }}
    - name: cache
      emptyDir: {}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $values.sharedMemory }}
{{- end }}

{{- define "quire.claim" -}}
{{ .Values.models.existingClaim | default (printf "%s-models" (include "quire.name" .)) }}
{{- end }}
