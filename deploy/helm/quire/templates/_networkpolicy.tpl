{{- define "quire.networkPolicy" -}}
{{- if .Values.networkPolicy.enabled }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "quire.name" . }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
  policyTypes:
    - Ingress
    - Egress
  ingress:
    # The API: for pods of this namespace, and of namespaces with the label.
    - from:
        - podSelector: {}
        {{- with .Values.networkPolicy.namespaceLabels }}
        - namespaceSelector:
            matchLabels:
              {{- toYaml . | nindent 14 }}
        {{- end }}
      ports:
        - port: http
    {{- if include "quire.scalesToZero" . }}
    # KEDA's interceptor.
    - from:
        - namespaceSelector:
            matchLabels:
              kubernetes.io/metadata.name: {{ include "quire.interceptorNamespace" . }}
      ports:
        - port: http
    {{- end }}
    # The hosts of a server use ephemeral ports.
    - from:
        - podSelector:
            matchLabels:
              {{- include "quire.selector" . | nindent 14 }}
    {{- with .Values.networkPolicy.kvEvents.from }}
    # KV events. Each replica has ports of its own.
    - from:
        {{- toYaml . | nindent 8 }}
      ports:
        {{- range include "quire.kvEventsPorts" $ | fromJsonArray }}
        - port: {{ int . }}
          endPort: {{ add . $.Values.networkPolicy.kvEvents.replicas | add -1 | min 65535 }}
          protocol: TCP
        {{- end }}
    {{- end }}
    {{- with .Values.networkPolicy.extraIngress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  egress:
    - to:
        - podSelector:
            matchLabels:
              {{- include "quire.selector" . | nindent 14 }}
    # DNS, and downloads of models.
    - ports:
        - port: 53
          protocol: UDP
        - port: 53
          protocol: TCP
        - port: 443
          protocol: TCP
    {{- with index .Values.config "otlp-traces-endpoint" }}
    # Traces. Without a port, those of OTLP.
    - ports:
        {{- $authority := regexReplaceAll "^[^/]*://" . "" | regexFind "^[^/?#]*" }}
        {{- range regexFind ":[0-9]+$" $authority | trimPrefix ":" | default "4317,4318" | splitList "," }}
        - port: {{ . }}
          protocol: TCP
        {{- end }}
    {{- end }}
    {{- with .Values.networkPolicy.extraEgress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
