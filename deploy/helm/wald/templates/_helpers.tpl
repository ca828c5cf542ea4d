{{/* The name of everything: RELEASE-wald, or RELEASE if that says wald already. */}}
{{- define "wald.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- /* Room for the suffixes, and for the pod's ordinal: 63 in all. */ -}}
{{- default $full .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* What never changes in a release: selectors and claims are immutable. No version. */}}
{{- define "wald.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "wald.labels" -}}
{{ include "wald.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "wald.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The settings as TOML: whole numbers and truths bare, everything else a string. */}}
{{- define "wald.toml" -}}
# `config` of the chart's values.
{{- range $key, $value := .Values.config }}
{{ $key }} = {{ kindIs "float64" $value | ternary (int64 $value) (toJson $value) }}
{{- end }}
{{- if and .Release.IsUpgrade (not (hasKey .Values.config "create_store")) }}
# The release was installed before, so its volume has a store. One without was replaced or is not mounted.
create_store = false
{{- end }}
{{- if not (hasKey .Values.config "console_hosts") }}
{{- $name := include "wald.fullname" . }}
{{- $inside := printf "%s.svc" .Release.Namespace }}
# Names of the Services and of the pod, for scrapers that do not come by an address.
console_hosts = {{ list
  (printf "%s.%s" $name .Release.Namespace)
  (printf "%s.%s" $name $inside)
  (printf "%s.%s.cluster.local" $name $inside)
  (printf ".%s-headless.%s" $name $inside)
  (printf ".%s-headless.%s.cluster.local" $name $inside) | join ", " | toJson }}
{{- end }}
{{- end }}

{{/* Whole seconds, rounded up, of a span as Wald reads it: 500us, 5ms, 30s, 1h30m, 1d. */}}
{{- define "wald.seconds" -}}
{{- $units := dict "w" 604800.0 "d" 86400.0 "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001 "us" 0.000001 "µs" 0.000001 "ns" 0.000000001 -}}
{{- $total := 0.0 -}}
{{- range regexFindAll "[0-9.]+ *[a-zµ]+" . -1 -}}
{{- $number := regexFind "^[0-9.]+" . | float64 -}}
{{- $unit := regexFind "[a-zµ]+$" . -}}
{{- $total = addf $total (mulf $number (get $units $unit | default 1.0)) -}}
{{- end -}}
{{ ceil $total | int64 }}
{{- end }}

{{/*
Size in the claim template. Kubernetes refuses to change it, so an upgrade keeps the size of the
StatefulSet that is there; the claim itself is grown as the README says.
*/}}
{{- define "wald.templateSize" -}}
{{- $size := .Values.persistence.size -}}
{{- $there := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "wald.fullname" .) -}}
{{- range (dig "spec" "volumeClaimTemplates" (list) $there) -}}
{{- $size = .spec.resources.requests.storage -}}
{{- end -}}
{{ $size }}
{{- end }}

{{/* What a clean stop may take, and some seconds for the process itself. */}}
{{- define "wald.gracePeriodSeconds" -}}
{{- $delay := include "wald.seconds" (.Values.config.drain_delay | default "0s" | toString) -}}
{{- $finish := include "wald.seconds" (.Values.config.shutdown_timeout | default "30s" | toString) -}}
{{ add $delay $finish 10 }}
{{- end }}

{{/* How the kubelet asks. Of (dict "root" . "grpc" SERVICE "http" PATH). */}}
{{- define "wald.probe" -}}
{{- if eq .root.Values.probes.kind "http" -}}
httpGet:
  port: http
  path: {{ .http }}
{{- else -}}
grpc:
  port: 6925
  service: {{ .grpc }}
{{- end -}}
{{- end }}

{{/* Refuses values that the engine does not support, with a sentence. */}}
{{- define "wald.check" -}}
{{- if ne .Values.engine.kind "local" -}}
{{- fail (printf "engine.kind is %q: this version of Wald has only the engine \"local\"" .Values.engine.kind) -}}
{{- end -}}
{{- if gt (int .Values.replicaCount) 1 -}}
{{- fail (printf "replicaCount is %d: the engine \"local\" keeps one journal on one volume, so it runs in one pod, and two would be two stores that know nothing of each other; more than one needs engine.kind \"object\", which this version does not have yet" (int .Values.replicaCount)) -}}
{{- end -}}
{{- end }}
