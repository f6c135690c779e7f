{{- /*
Envoy's configuration: requests go to the server of the model that the body names, or that the path begins with
(`/MODEL/…`, for any route of a server, by its name in modelSpec).
*/}}
{{- define "quire.routerConfig" -}}
{{- $error := dict "message" "the model does not exist, or the request names none; GET /v1/models lists the models" "type" "invalid_request_error" "param" "model" "code" "model_not_found" }}
{{- $models := list }}{{ $seen := dict }}
{{- range .servers }}
{{- range include "quire.modelNames" . | fromJsonArray }}
{{- if hasKey $seen . }}{{ fail (printf "modelSpec: two models are called %s; give one another config.served-model-name" .) }}{{ end }}
{{- $_ := set $seen . true }}
{{- $models = append $models (dict "id" . "object" "model" "created" 0 "owned_by" "quire") }}
{{- end }}
{{- end }}
{{- $listing := dict "object" "list" "data" $models | toJson }}
{{- $limit := mul (int .Values.router.maxBodyMiB) 1048576 }}
static_resources:
  listeners:
    - name: http
      address: {socket_address: {address: 0.0.0.0, port_value: 8000}}
      # A body is read to its end, which is where the model may be.
      per_connection_buffer_limit_bytes: {{ $limit }}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: http
                use_remote_address: true # sets X-Forwarded-For
                normalize_path: true
                path_with_escaped_slashes_action: UNESCAPE_AND_FORWARD # clients escape those of a model's name
                stream_idle_timeout: 3600s # a long prompt, a queue or a start before the first token
                route_config:
                  max_direct_response_body_size_bytes: {{ max 4096 (len $listing) }}
                  virtual_hosts:
                    - name: models
                      domains: ["*"]
                      routes:
                        {{- range list "/health/live" "/health/ready" "/health" "/ping" }}
                        - match: {path: {{ . }}}
                          direct_response: {status: 200}
                        {{- end }}
                        - match: {path: /v1/models}
                          response_headers_to_add: [{header: {key: content-type, value: application/json}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
                          direct_response: {status: 200, body: {inline_string: {{ $listing | quote }}}}
                        {{- range .servers }}
                        - match: {prefix: /{{ .model }}/}
                          route:
                            {{- include "quire.routeAction" . | nindent 28 }}
                            prefix_rewrite: /
                        {{- $server := . }}
                        {{- range include "quire.modelNames" . | fromJsonArray }}
                        - match: {path: {{ printf "/v1/models/%s" . | quote }}}
                          route:
                            {{- include "quire.routeAction" $server | nindent 28 }}
                        - match:
                            prefix: /
                            dynamic_metadata:
                              - filter: quire
                                path: [{key: model}]
                                value: {string_match: {exact: {{ . | quote }}}}
                          route:
                            {{- include "quire.routeAction" $server | nindent 28 }}
                        {{- end }}
                        {{- end }}
                        - match: {prefix: /}
                          response_headers_to_add: [{header: {key: content-type, value: application/json}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}]
                          direct_response: {status: 404, body: {inline_string: {{ dict "error" $error | toJson | quote }}}}
                http_filters:
                  - name: envoy.filters.http.json_to_metadata
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.json_to_metadata.v3.JsonToMetadata
                      request_rules:
                        allow_content_types_regex: {regex: ".*"}
                        allow_empty_content_type: true
                        rules:
                          - selectors: [{key: model}]
                            on_present: {metadata_namespace: quire, key: model}
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
    {{- range .servers }}
    - name: {{ .model }}
      type: STRICT_DNS
      connect_timeout: 2s
      lb_policy: LEAST_REQUEST
      per_connection_buffer_limit_bytes: {{ $limit }}
      # The queue is the server's, which answers 429 when it is full.
      circuit_breakers: {thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}]}
      {{- if eq (include "quire.scheme" .) "https" }}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
      {{- end }}
      {{- if include "quire.scalesToZero" . }}
      {{- $address := splitList ":" .Values.autoscaling.interceptor }}
      {{- include "quire.endpoint" (dict "name" .model "address" (first $address) "port" (last $address)) | nindent 6 }}
      {{- else }}
      health_checks:
        - timeout: 2s
          interval: 5s
          no_traffic_interval: 5s
          unhealthy_threshold: 2
          healthy_threshold: 1
          http_health_check: {path: /health/ready}
      {{- include "quire.endpoint" (dict "name" .model "address" (include "quire.name" .) "port" (include "quire.port" .)) | nindent 6 }}
      {{- end }}
    {{- end }}
{{- end }}

{{- define "quire.routeAction" -}}
cluster: {{ .model }}
timeout: 0s # an answer may take as long as it takes
{{- if include "quire.scalesToZero" . }}
host_rewrite_literal: {{ include "quire.interceptedHost" . }}
{{- end }}
# The request was not sent, and so has not run.
retry_policy: {retry_on: connect-failure, num_retries: 2}
{{- end }}

{{- define "quire.endpoint" -}}
load_assignment:
  cluster_name: {{ .name }}
  endpoints:
    - lb_endpoints:
        - endpoint: {address: {socket_address: {address: {{ .address }}, port_value: {{ .port }}}}}
{{- end }}
