{{- /* Refuse values of a server that would be rendered, but never get ready, or that would show a secret. */}}
{{- define "quire.check" -}}
{{- $secrets := "^(api|admin|metrics)-keys?$|^cluster-token$" }}
{{- $secretHint := printf "put it into the Secret that the value secret names (%s)" .Values.secret }}
{{- range $key, $value := .Values.config }}
{{- $flag := include "quire.flagName" $key }}
{{- if kindIs "invalid" $value }}
{{- else if regexMatch $secrets $flag }}
{{- fail (printf "config.%s would be readable in a ConfigMap; %s" $key $secretHint) }}
{{- else if regexMatch "^(api-key|cluster-token)-file$" $flag }}
{{- fail (printf "config.%s: the chart sets it to the file of the Secret that the value secret names (%s)" $key $.Values.secret) }}
{{- else if and $value (has $flag (list "uds" "headless")) }}
{{- fail (printf "config.%s: the pods would have no port, and would never be ready" $key) }}
{{- end }}
{{- end }}
{{- if ne (empty (index .Values.config "ssl-certfile")) (empty (index .Values.config "ssl-keyfile")) }}
{{- fail "config.ssl-certfile and config.ssl-keyfile: set both, or none" }}
{{- end }}
{{- range .Values.env }}
{{- if and (hasKey . "value") (regexMatch "^(QUIRE_.*KEY|VLLM_API_KEY|QUIRE_CLUSTER_TOKEN)$" .name) }}
{{- fail (printf "env: %s would be readable in the pods; use valueFrom with a secretKeyRef" .name) }}
{{- end }}
{{- end }}
{{- range .Values.extraArgs }}
{{- $flag := include "quire.flagName" . }}
{{- if regexMatch $secrets $flag }}
{{- fail (printf "extraArgs: --%s would be readable in the pods; %s" $flag $secretHint) }}
{{- else if regexMatch "^(host|port|uds|headless|shutdown-timeout|ssl-.*)$" $flag }}
{{- fail (printf "extraArgs: --%s: set config.%s, which probes, Services and grace periods follow" $flag $flag) }}
{{- else if eq $flag "config" }}
{{- fail "extraArgs: --config would replace the file with the values of config; set those instead" }}
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
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.kvEvents.from }}
{{- $first := include "quire.kvEventsPorts" . | fromJsonArray }}
{{- if not $first }}
{{- fail "networkPolicy.kvEvents.from: there are no ports to open; enable events in config.kv-events-config, with ports in its endpoints" }}
{{- end }}
{{- range $key, $port := merge (dict "port" (include "quire.port" .)) .Values.config }}
{{- if regexMatch "(^|-)port$" (include "quire.flagName" $key) }}
{{- range $first }}
{{- if and (ge (int $port) (int .)) (lt (int $port) (int (add . $.Values.networkPolicy.kvEvents.replicas))) }}
{{- fail (printf "config.%s: %d is one of the ports that networkPolicy.kvEvents opens, from %d on for %d replicas; choose another, or set networkPolicy.kvEvents.replicas" $key (int $port) (int .) (int $.Values.networkPolicy.kvEvents.replicas)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if and .by (lt (int .maxReplicas) (int .minReplicas)) }}
{{- fail (printf "autoscaling.maxReplicas: %d is below autoscaling.minReplicas: %d" (int .maxReplicas) (int .minReplicas)) }}
{{- end }}
{{- end }}
{{- if include "quire.scalesToZero" . }}
{{- if or (ne .Values.autoscaling.by "keda") (ne .Values.workload "deployment") (not .model) (eq (include "quire.scheme" .) "https") }}
{{- fail "autoscaling.minReplicas: 0 needs autoscaling.by: keda, workload: deployment and modelSpec, without TLS: the router keeps the address, and sends requests to KEDA's interceptor" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The flag that a key of `config` or an argument sets, such as `api-key` of `api_key.0` and `--api-key=x`. */}}
{{- define "quire.flagName" -}}
{{ regexReplaceAll "[.=].*" . "" | replace "_" "-" | trimPrefix "--" }}
{{- end }}

{{- /*
A YAML list of the chart's own objects and those of a value, whose names must differ. Arguments: own (YAML), value (its
name), more (its list).
*/}}
{{- define "quire.extend" -}}
{{- $names := dict }}
{{- range concat (fromYamlArray .own) (.more | default list) }}
{{- if hasKey $names .name }}{{ fail (printf "%s: the name %s is taken; the chart sets it, or the list has it twice" $.value .name) }}{{ end }}
{{- $_ := set $names .name true }}
{{- end }}
{{- .own }}
{{- with .more }}
{{ toYaml . }}
{{- end }}
{{- end }}
