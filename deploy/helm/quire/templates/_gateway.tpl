{{- define "quire.gateway" -}}
{{- if .Values.gateway.enabled }}
{{- $name := include "quire.name" . }}
{{- $picker := printf "%s-endpoint-picker" $name }}
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
      app.kubernetes.io/component: server
  targetPorts:
    - number: {{ include "quire.port" . }}
  endpointPickerRef:
    name: {{ $picker }}
    port:
      number: 9002
    failureMode: FailOpen
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  parentRefs:
    - name: {{ .Values.gateway.name }}
  rules:
    - matches:
        - path:
            type: PathPrefix
            value: /v1
      backendRefs:
        - group: inference.networking.k8s.io
          kind: InferencePool
          name: {{ $name }}
      # Answers may take long. `--request-timeout` of the server limits them.
      timeouts:
        request: 0s
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $picker }}
  labels:
    {{- include "quire.chartLabels" . | nindent 4 }}
    app.kubernetes.io/name: {{ $picker }}
data:
  endpoint-picker-config.yaml: |
    apiVersion: {{ .Values.gateway.configVersion }}
    kind: EndpointPickerConfig
    plugins:
      - type: metrics-data-source
      - type: core-metrics-extractor
        parameters:
          defaultEngine: quire
          engineConfigs:
            - name: quire
              queuedRequestsSpec: quire:num_requests_waiting
              runningRequestsSpec: quire:num_requests_running
              kvUsageSpec: quire:kv_cache_usage_perc
              cacheNumBlocksSpec: quire:kv_cache_blocks
      - type: queue-scorer
      - type: kv-cache-utilization-scorer
      - type: prefix-cache-scorer
    schedulingProfiles:
      - name: default
        plugins:
          - pluginRef: queue-scorer
            weight: 2
          - pluginRef: kv-cache-utilization-scorer
            weight: 2
          - pluginRef: prefix-cache-scorer
            weight: 3
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $picker }}
  labels:
    {{- include "quire.chartLabels" . | nindent 4 }}
    app.kubernetes.io/name: {{ $picker }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $picker }}
  labels:
    {{- include "quire.chartLabels" . | nindent 4 }}
    app.kubernetes.io/name: {{ $picker }}
rules:
  - apiGroups:
      - ""
    resources:
      - pods
    verbs:
      - get
      - list
      - watch
  - apiGroups:
      - inference.networking.k8s.io
    resources:
      - inferencepools
    verbs:
      - get
      - list
      - watch
  - apiGroups:
      - inference.networking.x-k8s.io
      - llm-d.ai
    resources:
      - inferenceobjectives
      - inferencemodelrewrites
    verbs:
      - get
      - list
      - watch
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $picker }}
  labels:
    {{- include "quire.chartLabels" . | nindent 4 }}
    app.kubernetes.io/name: {{ $picker }}
subjects:
  - kind: ServiceAccount
    name: {{ $picker }}
    namespace: {{ .Release.Namespace }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $picker }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $picker }}
  labels:
    {{- include "quire.chartLabels" . | nindent 4 }}
    app.kubernetes.io/name: {{ $picker }}
spec:
  # It remembers which prompts it has sent where.
  replicas: 1
  strategy:
    type: Recreate
  selector:
    matchLabels:
      app.kubernetes.io/name: {{ $picker }}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {{ $picker }}
    spec:
      serviceAccountName: {{ $picker }}
      enableServiceLinks: false
      # Longer than the servers' period, as their requests pass through it.
      terminationGracePeriodSeconds: 130
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: endpoint-picker
          image: {{ .Values.gateway.image }}
          args:
            - --pool-name
            - {{ $name }}
            - --pool-namespace
            - $(NAMESPACE)
            - --pool-group
            - inference.networking.k8s.io
            - --config-file
            - /config/endpoint-picker-config.yaml
            - --grpc-health-port
            - "9003"
            - --tracing=false
            - --metrics-endpoint-auth=false
          env:
            - name: NAMESPACE
              valueFrom:
                fieldRef:
                  fieldPath: metadata.namespace
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
          ports:
            - name: grpc
              containerPort: 9002
            - name: grpc-health
              containerPort: 9003
            - name: metrics
              containerPort: 9090
          readinessProbe:
            grpc:
              port: 9003
              service: inference-extension
            periodSeconds: 2
          livenessProbe:
            grpc:
              port: 9003
              service: inference-extension
            initialDelaySeconds: 5
            periodSeconds: 10
          resources:
            requests:
              cpu: "1"
              memory: 1Gi
            limits:
              memory: 4Gi
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop:
                - ALL
          volumeMounts:
            - name: config
              mountPath: /config
              readOnly: true
      volumes:
        - name: config
          configMap:
            name: {{ $picker }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $picker }}
  labels:
    {{- include "quire.chartLabels" . | nindent 4 }}
    app.kubernetes.io/name: {{ $picker }}
spec:
  selector:
    app.kubernetes.io/name: {{ $picker }}
  ports:
    - name: grpc-ext-proc
      port: 9002
      targetPort: grpc
      appProtocol: kubernetes.io/h2c
    - name: http-metrics
      port: 9090
      targetPort: metrics
{{- end }}
{{- end }}
