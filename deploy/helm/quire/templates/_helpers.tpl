{{- /* The release's name: of what its servers share. */}}
{{- define "quire.release" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-quire" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* A server's name: the release's, and that of its model if there are several. */}}
{{- define "quire.name" -}}
{{- $release := include "quire.release" . }}
{{- if .model }}{{ printf "%s-%s" ($release | trunc (sub 39 (len .model) | int) | trimSuffix "-") .model }}{{ else }}{{ $release }}{{ end }}
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

{{- define "quire.releaseLabels" -}}
app.kubernetes.io/name: {{ include "quire.release" . }}
{{ include "quire.chartLabels" . }}
{{- end }}

{{- /*
Set `servers` of the root: a context like it for each server, with `model`, its name in modelSpec, and with its own
values. Keys of `config` have dashes there.
*/}}
{{- define "quire.setServers" -}}
{{- $servers := list }}
{{- range $model, $values := .Values.modelSpec | default (dict "" dict) }}
{{- $values = mergeOverwrite (deepCopy $.Values) (deepCopy ($values | default dict)) }}
{{- $config := dict }}
{{- range $flag, $value := $values.config }}
{{- $_ := set $config (ternary $flag (replace "_" "-" $flag) (contains "." $flag)) $value }}
{{- end }}
{{- $_ := set $values "config" $config }}
{{- $servers = append $servers (dict "Values" $values "Release" $.Release "Chart" $.Chart "model" $model) }}
{{- end }}
{{- $_ := set . "servers" $servers }}
{{- end }}

{{- /* The port and the scheme of a server, and the seconds of its drain, whose default is that of `quire serve`. */}}
{{- define "quire.port" -}}
{{ .Values.config.port | default 8000 | int }}
{{- end }}

{{- define "quire.scheme" -}}
{{ ternary "https" "http" (not (empty (index .Values.config "ssl-certfile"))) }}
{{- end }}

{{- define "quire.drainSeconds" -}}
{{- $seconds := index .Values.config "shutdown-timeout" }}
{{- kindIs "invalid" $seconds | ternary 30 ($seconds | int) }}
{{- end }}

{{- /* The names of a server's model in requests, as a JSON list. */}}
{{- define "quire.modelNames" -}}
{{- $names := index .Values.config "served-model-name" | default (.Values.config.model | default "quire-demo") }}
{{- kindIs "slice" $names | ternary $names (list $names) | toJson }}
{{- end }}

{{- /*
The ports of KV events of replica 0, as a JSON list. `config.kv-events-config` may be JSON, a mapping, or keys with a dot.
*/}}
{{- define "quire.kvEventsPorts" -}}
{{- $events := index .Values.config "kv-events-config" | default dict }}
{{- if kindIs "string" $events }}{{ $events = fromJson $events }}{{ end }}
{{- if hasKey $events "Error" }}{{ fail "config.kv-events-config: networkPolicy.kvEvents needs its fields here, as JSON or YAML" }}{{ end }}
{{- range $key, $value := .Values.config }}
{{- with regexFind "^kv[-_]events[-_]config[.].+" $key }}{{ $events = set (deepCopy $events) (splitList "." . | last) $value }}{{ end }}
{{- end }}
{{- $ports := list }}
{{- if and (eq (toString $events.enable_kv_cache_events) "true") (ne (toString $events.publisher) "null") }}
{{- range list ($events.endpoint | default "tcp://*:5557") ($events.replay_endpoint | default "") }}
{{- with regexFind "^tcp:.*:[1-9][0-9]*$" . }}{{ $ports = append $ports (splitList ":" . | last | int) }}{{ end }}
{{- end }}
{{- end }}
{{- toJson $ports }}
{{- end }}

{{- define "quire.scalesToZero" -}}
{{- if and .Values.autoscaling.by (eq (int .Values.autoscaling.minReplicas) 0) }}true{{ end }}
{{- end }}

{{- define "quire.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "quire.release" .) "" .Values.serviceAccount.create) }}
{{- end }}

{{- define "quire.claim" -}}
{{ .Values.models.existingClaim | default (printf "%s-models" (include "quire.release" .)) }}
{{- end }}

{{- define "quire.cacheClaim" -}}
{{ .Values.cache.existingClaim | default (ternary (printf "%s-cache" (include "quire.name" .)) "" (not (empty .Values.cache.size))) }}
{{- end }}
