{{- define "quire.workload" -}}
{{- $name := include "quire.name" . }}
{{- $root := . }}
{{- $values := .Values }}
{{- $preStop := int .Values.preStopSeconds }}
{{- $drain := include "quire.drainSeconds" . | int }}
{{- /* Pods that the server needs until it has drained wait for that. */}}
{{- $wait := add $preStop $drain }}
{{- $grace := add $preStop $drain 30 }}
{{- $resources := include "quire.hostResources" . }}
{{- $apiResources := toYaml .Values.apiResources }}
{{- $serve := list "serve" "--config" "/etc/quire/quire.yaml" }}
{{- $keys := ternary list (list "--api-key-file" "/run/secrets/quire/api-keys") .Values.gateway.enabled }}
{{- $keyEnv := ternary list (list "QUIRE_METRICS_KEY") .Values.gateway.enabled }}
{{- $token := list "--cluster-token-file" "/run/secrets/quire/cluster-token" }}
{{- if eq .Values.workload "deployment" }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  {{- if not .Values.autoscaling.by }}
  replicas: {{ .Values.replicas }}
  {{- end }}
  strategy:
    {{- toYaml .Values.strategy | nindent 4 }}
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
      app.kubernetes.io/component: server
  template:
    {{- $server := dict "root" . "name" "quire" "args" (concat $serve $keys) "env" $keyEnv "api" true "secrets" (not .Values.gateway.enabled) "preStop" $preStop "resources" $resources }}
    {{- include "quire.podTemplate" (dict "root" . "component" "server" "grace" $grace "containers" (list $server)) | nindent 4 }}
{{- else if eq .Values.workload "leaderWorkerSet" }}
{{- $rank := list "--nnodes" "$(LWS_GROUP_SIZE)" "--node-rank" "$(LWS_WORKER_INDEX)" "--master-addr" }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}-group
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  {{- if not .Values.autoscaling.by }}
  replicas: {{ .Values.replicas }}
  {{- end }}
  startupPolicy: LeaderCreated
  leaderWorkerTemplate:
    size: {{ .Values.hosts }}
    # Pods that restart join the others again, whose requests go on.
    restartPolicy: None
    leaderTemplate:
      {{- $server := dict "root" . "name" "quire" "args" (concat $serve $keys $token $rank (list "$(QUIRE_HOST_IP)")) "env" (append $keyEnv "QUIRE_HOST_IP") "api" true "secrets" true "preStop" $preStop "resources" $resources }}
      {{- include "quire.podTemplate" (dict "root" . "component" "server" "grace" $grace "containers" (list $server)) | nindent 6 }}
    workerTemplate:
      {{- $worker := dict "root" . "name" "quire" "args" (concat $serve $token $rank (list "$(LWS_LEADER_ADDRESS)" "--headless")) "env" (list "QUIRE_HOST_IP") "secrets" true "preStop" $wait "resources" $resources }}
      {{- include "quire.podTemplate" (dict "root" . "component" "worker" "grace" $grace "containers" (list $worker)) | nindent 6 }}
{{- else if or (eq .Values.workload "statefulSet") (eq .Values.workload "replicas") }}
{{- $server := dict }}
{{- $other := dict }}
{{- if eq .Values.workload "statefulSet" }}
{{- $rank := list "--node-rank" "$(POD_INDEX)" "--master-addr" }}
{{- $server = dict "args" (concat $rank (list "$(QUIRE_HOST_IP)")) "env" (list "POD_INDEX" "QUIRE_HOST_IP") "resources" $resources }}
{{- $other = dict "args" (concat $rank (list (printf "%s-0.%s-hosts" $name $name) "--headless")) "preStop" $wait "grace" $grace "component" "worker" "replicas" (sub (int .Values.hosts) 1) }}
{{- else }}
{{- $server = dict "args" (list "--data-parallel-size-local" "0" "--data-parallel-address" "$(QUIRE_HOST_IP)") "env" (list "QUIRE_HOST_IP") "resources" $apiResources }}
{{- $other = dict "args" (list "--data-parallel-start-rank" "$(POD_INDEX)" "--data-parallel-address" (printf "%s-0.%s-hosts" $name $name) "--headless") "preStop" 0 "grace" (add $drain 30) "component" "replica" "replicas" .Values.replicas }}
{{- end }}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  replicas: 1
  serviceName: {{ $name }}-hosts
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
      app.kubernetes.io/component: server
  template:
    {{- $container := dict "root" . "name" "quire" "args" (concat $serve $keys $token $server.args) "env" (concat $keyEnv $server.env) "api" true "secrets" true "preStop" $preStop "resources" $server.resources }}
    {{- include "quire.podTemplate" (dict "root" . "component" "server" "grace" $grace "containers" (list $container)) | nindent 4 }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}-{{ $other.component }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  {{- if not (and .Values.autoscaling.by (eq .Values.workload "replicas")) }}
  replicas: {{ $other.replicas }}
  {{- end }}
  serviceName: {{ $name }}-hosts
  podManagementPolicy: Parallel
  {{- if eq .Values.workload "statefulSet" }}
  # The server is number 0.
  ordinals:
    start: 1
  {{- end }}
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
      app.kubernetes.io/component: {{ $other.component }}
  template:
    {{- $container := dict "root" . "name" "quire" "args" (concat $serve $token $other.args) "env" (list "POD_INDEX" "QUIRE_HOST_IP") "secrets" true "preStop" $other.preStop "resources" $resources }}
    {{- include "quire.podTemplate" (dict "root" . "component" $other.component "grace" $other.grace "containers" (list $container)) | nindent 4 }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}-hosts
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  # One DNS name for each pod.
  clusterIP: None
  # A server is not ready before all hosts have found each other.
  publishNotReadyAddresses: true
  selector:
    {{- include "quire.selector" . | nindent 4 }}
{{- else if eq .Values.workload "ray" }}
{{- $ray := dict "root" . "name" "ray" "env" (list "RAY_AUTH") "preStop" $wait "resources" $resources }}
apiVersion: ray.io/v1
kind: RayCluster
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  rayVersion: "2.60.0"
  upgradeStrategy:
    type: Recreate
  headGroupSpec:
    rayStartParams:
      disable-usage-stats: "true"
      object-store-memory: "100000000"
      include-dashboard: "false"
    template:
      {{- $server := dict "root" . "name" "quire" "args" (concat $serve $keys (list "--distributed-executor-backend" "ray")) "env" (concat $keyEnv (list "RAY_AUTH" "POD_IP" "RAY_ADDRESS")) "api" true "secrets" true "preStop" $preStop "resources" $apiResources }}
      {{- $head := merge (dict "port" 6379) $ray }}
      {{- include "quire.podTemplate" (dict "root" . "component" "server" "grace" $grace "containers" (list $head $server) "shareProcessNamespace" true) | nindent 6 }}
  workerGroupSpecs:
    - groupName: workers
      replicas: {{ sub (int .Values.hosts) 1 }}
      minReplicas: {{ sub (int .Values.hosts) 1 }}
      maxReplicas: {{ sub (int .Values.hosts) 1 }}
      rayStartParams:
        disable-usage-stats: "true"
        object-store-memory: "100000000"
        node-manager-port: "6380"
      template:
        {{- $worker := merge (dict "port" 6380) $ray }}
        {{- include "quire.podTemplate" (dict "root" . "component" "worker" "grace" $grace "containers" (list $worker)) | nindent 8 }}
{{- end }}
{{- end }}
