{{- /* Refuse values of a server that would be rendered, but never get ready, or that would show a secret. */}}
{{- define "quire.check" -}}
{{- $secrets := "^(api|admin|metrics)-keys?$|^cluster-token$" }}
{{- $secretHint := printf "put it into the Secret that the value secret names (%s)" .Values.secret }}
{{- range $flag, $value := .Values.config }}
{{- if regexMatch $secrets $flag }}
{{- fail (printf "config.%s would be readable in a ConfigMap; %s" $flag $secretHint) }}
{{- else if has $flag (list "uds" "headless") }}
{{- fail (printf "config.%s: the pods would have no port, and would never be ready" $flag) }}
{{- end }}
{{- end }}
{{- range .Values.extraArgs }}
{{- $flag := regexReplaceAll "=.*" . "" | replace "_" "-" | trimPrefix "--" }}
{{- if regexMatch $secrets $flag }}
{{- fail (printf "extraArgs: --%s would be readable in the pods; %s" $flag $secretHint) }}
{{- else if regexMatch "^(host|port|uds|headless|shutdown-timeout|ssl-.*)$" $flag }}
{{- fail (printf "extraArgs: --%s: set config.%s, which probes, Services and grace periods follow" $flag $flag) }}
{{- end }}
{{- end }}
{{- with .Values.config.host }}
{{- if regexMatch "^(127\\..*|localhost|::1)$" . }}
{{- fail (printf "config.host: %s can be reached only from inside the pod, which would never be ready; use 0.0.0.0 or ::" .) }}
{{- end }}
{{- end }}
{{- if eq (index .Values.config "ssl-cert-reqs" | int) 2 }}
{{- fail "config.ssl-cert-reqs: 2: the kubelet's probes have no client certificate, and the pods would never be ready; use 1" }}
{{- end }}
{{- if .model }}
{{- if has .model (list "v1" "v2" "health" "ping") }}{{ fail (printf "modelSpec.%s: the API has paths of this name; choose another" .model) }}{{ end }}
{{- $of := regexReplaceAll "-(download|hosts|worker|replica|group)$" .model "" }}
{{- if or (regexMatch "^(router|dashboard-.*)$" .model) (and (ne $of .model) (hasKey .Values.modelSpec $of)) }}
{{- fail (printf "modelSpec.%s: the release has objects of this name; choose another" .model) }}
{{- end }}
{{- $own := index .Values.modelSpec .model | default dict }}
{{- range list "modelSpec" "router" "service" "ingress" "httpRoute" "serviceAccount" "extraObjects" }}
{{- if hasKey $own . }}{{ fail (printf "modelSpec.%s.%s: set it for the release" $.model .) }}{{ end }}
{{- end }}
{{- range list "prometheusRule" "dashboards" }}
{{- if hasKey ($own.monitoring | default dict) . }}{{ fail (printf "modelSpec.%s.monitoring.%s: set it for the release" $.model .) }}{{ end }}
{{- end }}
{{- end }}
{{- if .Values.gateway.enabled }}
{{- if eq (include "quire.scheme" .) "https" }}{{ fail "gateway.enabled: the endpoint picker reads metrics without TLS; omit config.ssl-certfile" }}{{ end }}
{{- if .model }}{{ fail "gateway.enabled with modelSpec: use one release for each model" }}{{ end }}
{{- end }}
{{- if include "quire.scalesToZero" . }}
{{- if or (ne .Values.autoscaling.by "keda") (ne .Values.workload "deployment") (not .model) (eq (include "quire.scheme" .) "https") }}
{{- fail "autoscaling.minReplicas: 0 needs autoscaling.by: keda, workload: deployment and modelSpec, without TLS: the router keeps the address, and sends requests to KEDA's interceptor" }}
{{- end }}
{{- end }}
{{- end }}
