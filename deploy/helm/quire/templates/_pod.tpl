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

{{- /* The chart's own environment variables: a YAML list, from their names. */}}
{{- define "quire.env" -}}
{{- range .names }}
{{- if eq . "QUIRE_METRICS_KEY" }}
- name: QUIRE_METRICS_KEY
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

{{- /* A probe of a path of the API. */}}
{{- define "quire.httpGet" -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- if eq (include "quire.scheme" .root) "https" }}
  scheme: HTTPS
  {{- end }}
{{- end }}

{{- /*
A container of the image. Arguments: root, name (quire or ray), args, env (names), api (has the HTTP API), port (of a
Ray container), preStop (seconds; 0: none), secrets (uses the Secret's files), resources (YAML).
*/}}
{{- define "quire.container" -}}
{{- $values := .root.Values }}
name: {{ .name }}
{{ include "quire.image" .root }}
{{- with .args }}
args:
  {{- concat . $values.extraArgs | toYaml | nindent 2 }}
{{- end }}
{{- $own := include "quire.env" (dict "root" .root "names" .env) | trim }}
{{- with include "quire.extend" (dict "own" $own "value" "env" "more" $values.env) | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
{{- with $values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .api }}
ports:
  - name: http
    containerPort: {{ include "quire.port" .root }}
# Until the model is loaded: up to an hour.
startupProbe:
  {{- include "quire.httpGet" (dict "root" .root "path" "/health/ready") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 720
readinessProbe:
  {{- include "quire.httpGet" (dict "root" .root "path" "/health/ready") | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 5
# Not /health, which fails while the engine restarts by itself.
livenessProbe:
  {{- include "quire.httpGet" (dict "root" .root "path" "/health/live") | nindent 2 }}
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
  {{- toYaml $values.securityContext | nindent 2 }}
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
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* The volume at /cache. */}}
{{- define "quire.cacheVolume" -}}
name: cache
{{- with include "quire.cacheClaim" . | trim }}
persistentVolumeClaim:
  claimName: {{ . }}
{{- else }}
emptyDir: {}
{{- end }}
{{- end }}

{{- /*
A pod template. Arguments: root, component, containers (a list of arguments of quire.container), grace (seconds),
shareProcessNamespace.
*/}}
{{- define "quire.podTemplate" -}}
{{- $values := .root.Values }}
metadata:
  labels:
    {{- include "quire.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "quire.flags" .root | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- mergeOverwrite (include "quire.podSpec" . | fromYaml) (deepCopy $values.podSpec) | toYaml | nindent 2 }}
{{- end }}

{{- define "quire.podSpec" -}}
{{- $values := .root.Values }}
{{- $files := false }}{{ $secrets := false }}
{{- range .containers }}
{{- if eq .name "quire" }}{{ $files = true }}{{ end }}
{{- if .secrets }}{{ $secrets = true }}{{ end }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "quire.serviceAccount" .root | trim }}
serviceAccountName: {{ . }}
{{- end }}
{{- if .shareProcessNamespace }}
# Ray looks for the processes that use it, such as the server.
shareProcessNamespace: true
{{- end }}
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- range $key := list "imagePullSecrets" "runtimeClassName" "priorityClassName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "initContainers" }}
{{- with (index $values $key) }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
containers:
  {{- range .containers }}
  - {{- include "quire.container" . | nindent 4 }}
  {{- end }}
  {{- with $values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  {{- $own := include "quire.volumes" (dict "root" .root "files" $files "secrets" $secrets) | trim }}
  {{- include "quire.extend" (dict "own" $own "value" "extraVolumes" "more" $values.extraVolumes) | nindent 2 }}
{{- end }}

{{- /* The chart's own volumes of a pod: a YAML list. Arguments: root, files (of flags), secrets (their files). */}}
{{- define "quire.volumes" -}}
{{- if .files }}
- name: config
  configMap:
    name: {{ include "quire.name" .root }}
{{- end }}
{{- if .secrets }}
- name: secrets
  secret:
    secretName: {{ .root.Values.secret }}
    defaultMode: 288 # 0440
{{- end }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "quire.claim" .root }}
- {{- include "quire.cacheVolume" .root | nindent 2 }}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .root.Values.sharedMemory }}
{{- end }}
