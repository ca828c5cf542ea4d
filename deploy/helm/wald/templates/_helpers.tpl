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

{{/*
Every name of the Services and of the pods inside the cluster, and those that pods advertise, in JSON. Wildcards need three labels, so the short names of pods are whole. A
replica has the names of as many pods as it may have, so that no change of replicaCount changes certificates and settings.
*/}}
{{- define "wald.names" -}}
{{- $name := include "wald.fullname" . }}
{{- $headless := printf "%s-headless" $name }}
{{- $names := list $name $headless }}
{{- range $ordinal := until (ternary 3 1 .Values.replica.enabled) }}
{{- $names = append $names (printf "%s-%d.%s" $name $ordinal $headless) }}
{{- $host := $.Values.replica.advertise | replace "$(POD_NAME)" (printf "%s-%d" $name $ordinal) | regexFind "^[^:]+" }}
{{- if and $host (not (regexMatch "^([0-9.]+|\\[.*)$" $host)) }}
{{- $names = append $names $host }}
{{- end }}
{{- end }}
{{- range $host := list $name $headless (printf "*.%s" $headless) }}
{{- range $domain := list "" ".svc" ".svc.cluster.local" }}
{{- $names = append $names (printf "%s.%s%s" $host $.Release.Namespace $domain) }}
{{- end }}
{{- end }}
{{- toJson (uniq $names) }}
{{- end }}

{{/* The Secret with the server's certificate. */}}
{{- define "wald.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "wald.fullname" .)) -}}
{{- end }}

{{/* The name that clients inside the cluster expect in the certificate. */}}
{{- define "wald.serverName" -}}
{{- $names := .Values.tls.certManager.dnsNames | default (list (printf "%s.%s.svc" (include "wald.fullname" .) .Release.Namespace)) -}}
{{- .Values.tls.serverName | default (first $names) -}}
{{- end }}

{{/* "true" if the daemon knows its callers: by tokens and certificates, or because all have certificates. */}}
{{- define "wald.knowsCallers" -}}
{{- if or .Values.auth.existingSecret (and .Values.tls.enabled (eq .Values.tls.clientAuth "require")) -}}
true
{{- end -}}
{{- end }}

{{/*
The part of the HTTP port that shows or takes records and is on for other machines: `console` or `http_api`; empty if none is.
*/}}
{{- define "wald.exposed" -}}
{{- if eq (toString .Values.config.console) "on" -}}
console
{{- else if eq (toString .Values.config.http_api) "on" -}}
http_api
{{- end -}}
{{- end }}

{{/*
"true" if the daemon must be permitted to serve without TLS, or callers that it does not know, on the gRPC port or the HTTP port. The
NetworkPolicy alone is enough for plaintext without tokens; everything else needs `insecure`.
*/}}
{{- define "wald.insecureListen" -}}
{{- if not (and .Values.tls.enabled (include "wald.knowsCallers" .)) -}}
{{- $closed := and .Values.networkPolicy.enabled (not .Values.tls.enabled) (not .Values.auth.existingSecret) -}}
{{- if or $closed .Values.insecure -}}
true
{{- end -}}
{{- else if and .Values.insecure (not .Values.auth.existingSecret) (include "wald.exposed" .) -}}
true
{{- end -}}
{{- end }}

{{/* Whether no pod of the installed release has been ready, as far as the cluster shows: then there is no store yet, and an
     upgrade that mends the values is a first start. The cluster shows the present state alone, and a pod that is not ready now may have a
     store. This is therefore true for one hour after the installation at most. */}}
{{- define "wald.neverReady" -}}
{{- $set := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "wald.fullname" .) -}}
{{- $map := lookup "v1" "ConfigMap" .Release.Namespace (include "wald.fullname" .) -}}
{{- $had := regexMatch "(?m)^create_store = false$" (get ($map.data | default dict) "wald.toml" | default "") -}}
{{- $hourAgo := dateInZone "2006-01-02T15:04:05Z" (now | dateModify "-1h") "UTC" -}}
{{- if and $set (not $had) (not ($set.status).readyReplicas) (gt (toString ($set.metadata).creationTimestamp) $hourAgo) -}}
true
{{- end -}}
{{- end }}

{{/* The settings as TOML: whole numbers and truths bare, everything else a string. */}}
{{- define "wald.toml" -}}
# `config` of the chart's values.
{{- range $key, $value := .Values.config }}
{{ $key }} = {{ kindIs "float64" $value | ternary (int64 $value) (toJson $value) }}
{{- end }}
{{- if and .Release.IsUpgrade (not (hasKey .Values.config "create_store")) (not (include "wald.neverReady" .)) }}
# The release was installed before, so its volume has a store. One without was replaced or is not mounted.
create_store = false
{{- end }}
{{- if .Values.tls.enabled }}
# Secrets, mounted as directories: the daemon finds changed files by itself.
tls_cert = "/etc/wald-tls/tls.crt"
tls_key = "/etc/wald-tls/tls.key"
{{- if ne .Values.tls.clientAuth "off" }}
tls_client_auth = {{ .Values.tls.clientAuth | toJson }}
tls_client_ca = "/etc/wald-clients/ca.crt"
{{- with .Values.tls.clientCRLKey }}
tls_client_crl = {{ printf "/etc/wald-clients/%s" . | toJson }}
{{- end }}
{{- end }}
{{- if .Values.http.tls }}
http_tls = true
{{- end }}
{{- end }}
{{- if .Values.auth.existingSecret }}
auth_file = "/etc/wald-auth/auth.toml"
{{- if .Values.metricsOpen }}
metrics_open = true
{{- end }}
{{- end }}
{{- if .Values.encryption.existingSecret }}
encryption_key_file = "/etc/wald-encryption/key"
encryption_scope = {{ .Values.encryption.scope | toJson }}
{{- end }}
{{- with .Values.replica }}
{{- if .enabled }}
bucket_url = {{ .url | toJson }}
{{- with .endpoint }}
bucket_endpoint = {{ . | toJson }}
{{- end }}
{{- with .region }}
bucket_region = {{ . | toJson }}
{{- end }}
{{- if .insecure }}
bucket_insecure = true
{{- end }}
{{- if .credentialsSecret }}
bucket_credentials_file = "/etc/wald-bucket/credentials"
{{- end }}
# Each pod is a node of the store, also a single one: more may follow without a restart of the owner.
stand_by = true
{{- if $.Values.tls.enabled }}
# Stand-bys forward calls to the owner over TLS.
peer_ca = "/etc/wald-tls/ca.crt"
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.signatures.keySecret }}
backup_signing_key_file = "/etc/wald-signing/key.pem"
{{- end }}
{{- with .Values.signatures.trust }}
backup_trust = {{ join "," . | toJson }}
{{- end }}
{{- if not (hasKey .Values.config "console_hosts") }}
# Names of the Services and of the pod, for scrapers that do not come by an address. /metrics knows names without a dot by itself.
{{- $hosts := list }}
{{- range include "wald.names" . | fromJsonArray }}
{{- if contains "." . }}
{{- $hosts = append $hosts (trimPrefix "*" .) }}
{{- end }}
{{- end }}
console_hosts = {{ join ", " $hosts | toJson }}
{{- end }}
{{- end }}

{{/* The affinity of the pods. Those of a replica keep away from each other, but start where they must. */}}
{{- define "wald.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if and .Values.replica.enabled (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $terms := list -}}
{{- $labels := include "wald.selectorLabels" . | fromYaml | merge (dict "app.kubernetes.io/component" "daemon") -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" -}}
{{- $term := dict "topologyKey" $key "labelSelector" (dict "matchLabels" $labels) -}}
{{- $terms = append $terms (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- end -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $terms) -}}
{{- end -}}
{{- with $affinity -}}
{{ toYaml . }}
{{- end -}}
{{- end }}

{{/*
"true" if the StatefulSet starts its pods at once. Otherwise a pod that cannot start, as after the loss of its zone, would keep those behind it
from starting. Kubernetes refuses to change that, so an upgrade keeps the policy of the StatefulSet that is there, also without a replica.
*/}}
{{- define "wald.startsAtOnce" -}}
{{- $wanted := ternary "Parallel" "OrderedReady" .Values.replica.enabled -}}
{{- $there := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "wald.fullname" .) -}}
{{- if eq (dig "spec" "podManagementPolicy" $wanted $there) "Parallel" -}}
true
{{- end -}}
{{- end }}

{{/* The pod's service account. */}}
{{- define "wald.serviceAccountName" -}}
{{- if .Values.replica.serviceAccountAnnotations -}}
{{ include "wald.fullname" . }}
{{- else -}}
{{ .Values.serviceAccountName }}
{{- end -}}
{{- end }}

{{/* The port of an object store in its base URL: 443 unless it has another. */}}
{{- define "wald.bucketPort" -}}
{{- $port := regexFind ":[0-9]+(/|$)" . | trimAll ":/" -}}
{{- $port | default (ternary "80" "443" (hasPrefix "http://" .)) -}}
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

{{/* Time of a clean stop, and some seconds for the process itself. Kubernetes begins to count before the hook preStop. */}}
{{- define "wald.gracePeriodSeconds" -}}
{{- $hook := dig "preStop" "sleep" "seconds" 0 (.Values.lifecycle | default dict) | int64 -}}
{{- $delay := include "wald.seconds" (.Values.config.drain_delay | default "0s" | toString) -}}
{{- $finish := include "wald.seconds" (.Values.config.shutdown_timeout | default "30s" | toString) -}}
{{ .Values.terminationGracePeriodSeconds | default (add $hook $delay $finish 10) | int64 }}
{{- end }}

{{/* A request of the kubelet: (dict "root" . "path" PATH). By HTTP, because each probe is a new connection: the HTTP port always has
     a place for one, and the gRPC port has none while clients use all of max_connections. */}}
{{- define "wald.probe" -}}
httpGet:
  port: http
  path: {{ .path }}
  {{- if .root.Values.http.tls }}
  scheme: HTTPS
  {{- end }}
{{- end }}

{{/* Refuses values that the engine does not support, with a sentence. */}}
{{- define "wald.check" -}}
{{- if ne .Values.engine.kind "local" -}}
{{- fail (printf "engine.kind is %q: this version of Wald has only the engine \"local\"" .Values.engine.kind) -}}
{{- end -}}
{{- include "wald.checkTLS" . -}}
{{- include "wald.checkAuth" . -}}
{{- include "wald.checkBackup" . -}}
{{- include "wald.checkLogs" . -}}
{{- include "wald.checkReplica" . -}}
{{- include "wald.checkPods" . -}}
{{- include "wald.checkStop" . -}}
{{- include "wald.checkRoutes" . -}}
{{- include "wald.checkMonitoring" . -}}
{{- end }}

{{/* TLS that is set up halfway is refused: someone may count on it. */}}
{{- define "wald.checkTLS" -}}
{{- $tls := .Values.tls -}}
{{- if $tls.enabled -}}
{{- if eq (empty $tls.existingSecret) (not $tls.certManager.enabled) -}}
{{- fail "tls.enabled: set either tls.existingSecret, a Secret with tls.crt, tls.key and ca.crt, or tls.certManager.enabled" -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.enabled: set tls.certManager.issuerRef.name and kind, the issuer of cert-manager" -}}
{{- end -}}
{{- else -}}
{{- range $name, $given := dict "tls.existingSecret" $tls.existingSecret "tls.certManager.enabled" $tls.certManager.enabled "tls.clientAuth" (ne $tls.clientAuth "off") "http.tls" .Values.http.tls -}}
{{- if $given -}}
{{- fail (printf "%s has no effect without tls.enabled: set tls.enabled=true" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (ne $tls.clientAuth "off") (not $tls.clientCASecret) -}}
{{- fail (printf "tls.clientAuth is %q: set tls.clientCASecret, a Secret with the CAs of the clients (ca.crt)" $tls.clientAuth) -}}
{{- end -}}
{{- if and (eq $tls.clientAuth "off") (or $tls.clientCASecret $tls.clientCRLKey) -}}
{{- fail "tls.clientCASecret and tls.clientCRLKey have no effect while tls.clientAuth is off: set it to optional or require" -}}
{{- end -}}
{{- if and .Values.tests.enabled (eq $tls.clientAuth "require") (not .Values.tests.certSecret) -}}
{{- fail "tls.clientAuth is \"require\": `helm test` needs a certificate; set tests.certSecret, or tests.enabled=false" -}}
{{- end -}}
{{- end }}

{{/* Ports that let in too many callers, and credentials that others could see. */}}
{{- define "wald.checkAuth" -}}
{{- with .Values.encryption -}}
{{- if and (eq .scope "tenant") (not $.Values.auth.existingSecret) -}}
{{- fail "encryption.scope is tenant without auth.existingSecret: tenants are in auth.toml" -}}
{{- end -}}
{{- if and (ne .scope "store") (not .existingSecret) -}}
{{- fail "encryption.scope has no effect without encryption.existingSecret" -}}
{{- end -}}
{{- end -}}
{{- $auth := .Values.auth.existingSecret -}}
{{- $scraped := or .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- if and $auth (not .Values.tls.enabled) (not .Values.insecure) -}}
{{- fail "auth.existingSecret without tls.enabled: tokens would cross the network in plaintext; set up tls, or set insecure=true" -}}
{{- end -}}
{{- if not (or (include "wald.knowsCallers" .) (include "wald.insecureListen" .)) -}}
{{- if .Values.tls.enabled -}}
{{- fail "tls.enabled encrypts, but every client that reaches the port could read and append everything: set auth.existingSecret, or tls.clientAuth=require, or insecure=true" -}}
{{- end -}}
{{- fail "networkPolicy.enabled is false, and there is neither TLS nor auth: every program that reaches the port could read and append everything; set up tls and auth, or set insecure=true if something else protects the port" -}}
{{- end -}}
{{- if .Values.auth.kubernetes.enabled -}}
{{- if not .Values.auth.existingSecret -}}
{{- fail "auth.kubernetes has no effect without auth.existingSecret: auth.toml names the issuer" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.egress) -}}
{{- fail "auth.kubernetes: the NetworkPolicy keeps the daemon from the API server; permit the connection in networkPolicy.egress" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metricsOpen (not $auth) -}}
{{- fail "metricsOpen has no effect without auth.existingSecret: /metrics needs no token then" -}}
{{- end -}}
{{- if and $auth $scraped (not .Values.metricsOpen) (not .Values.serviceMonitor.authorization) -}}
{{- fail "serviceMonitor or podMonitor with auth.existingSecret: set http.tls=true and serviceMonitor.authorization, which names the Secret of a token with the right metrics, or metricsOpen=true" -}}
{{- end -}}
{{- if and $auth $scraped .Values.serviceMonitor.authorization (not .Values.http.tls) (not .Values.insecure) -}}
{{- fail "serviceMonitor.authorization without http.tls: the token would cross the network in plaintext with each scrape; set http.tls=true, or metricsOpen=true instead of the token, or insecure=true" -}}
{{- end -}}
{{- if and $auth .Values.config.echo -}}
{{- fail "config.echo: the echo service asks for no credential; it cannot be served with auth.existingSecret" -}}
{{- end -}}
{{- with include "wald.exposed" . -}}
{{- if and $auth (not $.Values.http.tls) (not $.Values.insecure) -}}
{{- fail (printf "config.%s is on: tokens and logins would cross the network in plaintext; set http.tls, or insecure=true" .) -}}
{{- else if not (or $auth (include "wald.insecureListen" $)) -}}
{{- fail (printf "config.%s is on: everyone who reaches the HTTP port could read every record; set http.tls and auth.existingSecret, or insecure=true" .) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A Job that the daemon would refuse fails the installation late, so it is refused here. */}}
{{- define "wald.checkLogs" -}}
{{- with .Values.logs -}}
{{- if .items -}}
{{- if and (eq $.Values.tls.clientAuth "require") (not .certSecret) -}}
{{- fail "logs.items with tls.clientAuth \"require\": set logs.certSecret" -}}
{{- end -}}
{{- if and $.Values.auth.existingSecret (not .tokenSecret) (not .certSecret) -}}
{{- fail "logs.items with auth.existingSecret: set logs.tokenSecret, the Secret of a token with the rights create, configure and list on these logs, or logs.certSecret" -}}
{{- end -}}
{{- if and .certSecret (not $.Values.tls.enabled) -}}
{{- fail "logs.certSecret has no effect without tls.enabled: set tls.enabled=true" -}}
{{- end -}}
{{- else if .prune -}}
{{- fail "logs.prune deletes every log below a prefix but those of logs.items, which is empty: name logs in logs.items" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A backup that cannot run is refused: someone may count on it. */}}
{{- define "wald.checkBackup" -}}
{{- with .Values.backup -}}
{{- if .enabled -}}
{{- if not .url -}}
{{- fail "backup.enabled: set backup.url, such as s3://BUCKET/PREFIX" -}}
{{- end -}}
{{- if and (hasPrefix "http://" .endpoint) (not .insecure) -}}
{{- fail "backup.endpoint has no TLS: others could read the records on their way; use https://, or set backup.insecure=true" -}}
{{- end -}}
{{- if and (eq $.Values.tls.clientAuth "require") (not .certSecret) -}}
{{- fail "backup.enabled with tls.clientAuth \"require\": set backup.certSecret" -}}
{{- end -}}
{{- if and $.Values.auth.existingSecret (not .tokenSecret) (not .certSecret) -}}
{{- fail "backup.enabled with auth.existingSecret: set backup.tokenSecret, the Secret of a token with the right backup, or backup.certSecret" -}}
{{- end -}}
{{- if and .certSecret (not $.Values.tls.enabled) -}}
{{- fail "backup.certSecret has no effect without tls.enabled: set tls.enabled=true" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Several pods that do not share a store, or cannot start, are refused, and so is one that would lose its records. */}}
{{- define "wald.checkPods" -}}
{{- $name := include "wald.fullname" . -}}
{{- $count := int .Values.replicaCount -}}
{{- if gt $count 1 -}}
{{- if not .Values.replica.enabled -}}
{{- fail (printf "replicaCount is %d: one pod keeps one journal on its volume, and two would be two stores that know nothing of each other; more than one pod needs replica.enabled and replica.url, the bucket that they share" $count) -}}
{{- end -}}
{{- if gt $count 3 -}}
{{- fail (printf "replicaCount is %d: one pod owns the store, and each other one only costs requests to the bucket and a copy; set 2 or 3" $count) -}}
{{- end -}}
{{- if .Values.persistence.existingClaim -}}
{{- fail (printf "replicaCount is %d, and persistence.existingClaim is one volume: each pod needs a volume of its own; leave it empty" $count) -}}
{{- end -}}
{{- range $key := list "nodeId" "advertise" -}}
{{- $value := get $.Values.replica $key -}}
{{- if and $value (not (contains "$(POD_NAME)" $value)) -}}
{{- fail (printf "replica.%s is %q, and replicaCount is %d: no two pods may have the same; put $(POD_NAME) into it, which becomes the name of the pod" $key $value $count) -}}
{{- end -}}
{{- end -}}
{{- $settings := dig "data" "wald.toml" "" (lookup "v1" "ConfigMap" .Release.Namespace $name) -}}
{{- if and $settings (not (contains "\nstand_by = true" $settings)) -}}
{{- fail (printf "replicaCount is %d, and the pod of this release ships nothing to the bucket yet, so that others could not begin: upgrade with replica.enabled and replicaCount 1 first, and wait until the pod is ready" $count) -}}
{{- end -}}
{{- if not (include "wald.startsAtOnce" .) -}}
{{- fail (printf "replicaCount is %d, and the StatefulSet %s starts its pods one after the other, which Kubernetes refuses to change: remove it without its pod by `kubectl -n %s delete statefulset %s --cascade=orphan`, and upgrade again" $count $name .Release.Namespace $name) -}}
{{- end -}}
{{- end -}}
{{- if not .Values.persistence.enabled -}}
{{- if not .Values.replica.enabled -}}
{{- fail "persistence.enabled is false: the records would end with the pod; that needs replica.enabled and replica.url, the bucket that keeps them" -}}
{{- end -}}
{{- if ne (toString .Values.config.sync_mode) "replicated" -}}
{{- fail "persistence.enabled is false: acknowledged records that are not in the bucket yet would end with the pod; set config.sync_mode=replicated" -}}
{{- end -}}
{{- if .Values.persistence.existingClaim -}}
{{- fail "persistence.existingClaim has no effect while persistence.enabled is false: leave it empty" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Times of a stop that the grace period does not know are refused: SIGKILL would cut off calls that are finishing. */}}
{{- define "wald.checkStop" -}}
{{- range $name := list "drain_delay" "shutdown_timeout" -}}
{{- range $.Values.extraArgs -}}
{{- if hasPrefix (printf "--%s" (replace "_" "-" $name)) (toString .) -}}
{{- fail (printf "extraArgs has %q, which the grace period of the pod does not follow: set config.%s" . $name) -}}
{{- end -}}
{{- end -}}
{{- range $.Values.extraEnv -}}
{{- if eq (printf "WALD_%s" (upper $name)) .name -}}
{{- fail (printf "extraEnv has %s, which the grace period of the pod does not follow: set config.%s" .name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A replica that is set up halfway is refused, and so is a take-over that a restart would repeat. */}}
{{- define "wald.checkReplica" -}}
{{- $backup := .Values.backup -}}
{{- with .Values.replica -}}
{{- if .enabled -}}
{{- if not .url -}}
{{- fail "replica.enabled: set replica.url, such as s3://BUCKET/PREFIX" -}}
{{- end -}}
{{- if and (hasPrefix "http://" .endpoint) (not .insecure) -}}
{{- fail "replica.endpoint has no TLS: others could read the records on their way; use https://, or set replica.insecure=true" -}}
{{- end -}}
{{- $own := printf "%s/" (trimSuffix "/" .url) -}}
{{- $other := printf "%s/" (trimSuffix "/" $backup.url) -}}
{{- if and $backup.enabled (or (hasPrefix $own $other) (hasPrefix $other $own)) -}}
{{- fail (printf "backup.url is %q, and replica.url is %q: backups and the replica need separate prefixes: neither may contain the other" $backup.url .url) -}}
{{- end -}}
{{- if and .serviceAccountAnnotations $.Values.serviceAccountName -}}
{{- fail "replica.serviceAccountAnnotations makes a service account: put the annotations on serviceAccountName instead, or leave that empty" -}}
{{- end -}}
{{- else -}}
{{- range $name := list "url" "endpoint" "region" "insecure" "credentialsSecret" "serviceAccountAnnotations" "nodeId" "advertise" "peers" "ports" "takeOverTerm" -}}
{{- if get $.Values.replica $name -}}
{{- fail (printf "replica.%s has no effect without replica.enabled: set replica.enabled=true" $name) -}}
{{- end -}}
{{- end -}}
{{- if eq (toString $.Values.config.sync_mode) "replicated" -}}
{{- fail "config.sync_mode is replicated: set replica.enabled and replica.url" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- if hasPrefix "--take-over" (toString .) -}}
{{- fail (printf "extraArgs has %q, which each restart would repeat: set replica.takeOverTerm, which takes the store from one owner alone" .) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Variables of a walctl that calls this release. `job` has `tokenSecret` and `certSecret`. */}}
{{- define "wald.walctlEnv" -}}
{{- $root := .root -}}
- name: WALD_ENDPOINT
  value: {{ ternary "https" "http" $root.Values.tls.enabled }}://{{ include "wald.fullname" $root }}:{{ $root.Values.service.port }}
{{- if $root.Values.tls.enabled }}
- name: WALD_TLS_CA
  value: /etc/wald-tls/ca.crt
- name: WALD_TLS_SERVER_NAME
  value: {{ include "wald.serverName" $root }}
{{- if .job.certSecret }}
- name: WALD_TLS_CERT
  value: /etc/wald-cert/tls.crt
- name: WALD_TLS_KEY
  value: /etc/wald-cert/tls.key
{{- end }}
{{- end }}
{{- if .job.tokenSecret }}
- name: WALD_TOKEN_FILE
  value: /etc/wald-token/token
{{- end }}
{{- end }}

{{/* Where that walctl finds the files of its variables. */}}
{{- define "wald.walctlMounts" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/wald-tls
  readOnly: true
{{- if .job.certSecret }}
- name: cert
  mountPath: /etc/wald-cert
  readOnly: true
{{- end }}
{{- end }}
{{- if .job.tokenSecret }}
- name: token
  mountPath: /etc/wald-token
  readOnly: true
{{- end }}
{{- end }}

{{/* The volumes of these mounts. */}}
{{- define "wald.walctlVolumes" -}}
{{- if .root.Values.tls.enabled }}
# Only the CA: the key is the daemon's.
- name: tls
  secret:
    secretName: {{ include "wald.tlsSecret" .root }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- with .job.certSecret }}
- name: cert
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with .job.tokenSecret }}
- name: token
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* Ways in from outside of the cluster. The NetworkPolicy cannot tell callers apart there. */}}
{{- define "wald.checkRoutes" -}}
{{- range $name := list "ingress" "grpcRoute" "httpRoute" -}}
{{- $route := get $.Values $name -}}
{{- if $route.enabled -}}
{{- /* A proxy that ends TLS has one client certificate for all callers, so that certificates alone tell nobody apart. */ -}}
{{- if not (or $.Values.auth.existingSecret $.Values.insecure) -}}
{{- fail (printf "%s.enabled: every caller from outside could read and append everything, also with client certificates, which end at the proxy; set auth.existingSecret, or insecure=true if something else asks who they are" $name) -}}
{{- end -}}
{{- if and (eq $name "ingress") (not $route.hosts) -}}
{{- fail "ingress.enabled: set ingress.hosts, the names that clients call" -}}
{{- end -}}
{{- if and (ne $name "ingress") (not $route.parentRefs) -}}
{{- fail (printf "%s.enabled: set %s.parentRefs, the gateways" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (ne (toString .Values.config.http_api) "on") -}}
{{- fail "httpRoute.enabled: the HTTP API is off; set config.http_api=on" -}}
{{- end -}}
{{- end }}

{{/* Alerts that the values name must be there: a typo would leave an alert as it is. */}}
{{- define "wald.checkMonitoring" -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- fail "serviceMonitor.enabled and podMonitor.enabled: each would scrape the pods; choose one" -}}
{{- end -}}
{{- $rule := .Values.prometheusRule -}}
{{- if and (or $rule.disabled $rule.overrides $rule.alertLabels) (not $rule.enabled) -}}
{{- fail "prometheusRule.disabled, overrides and alertLabels have no effect without prometheusRule.enabled" -}}
{{- end -}}
{{- $known := list -}}
{{- range $path, $_ := .Files.Glob "alerts/*.rules.yaml" -}}
{{- range ($.Files.Get $path | fromYaml).groups -}}
{{- range .rules -}}
{{- $known = append $known .alert -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $known -}}
{{- range $name := concat $rule.disabled (keys $rule.overrides) -}}
{{- if not (has $name $known) -}}
{{- fail (printf "prometheusRule names the alert %q, and there is none of this name; grafana/README.md lists them" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A file of alerts with the changes of the values. */}}
{{- define "wald.alerts" -}}
{{- $values := .root.Values.prometheusRule -}}
{{- $prefixed := .root.Files.Get .path | replace "runbook_url: " (printf "runbook_url: %s" $values.runbookUrlPrefix) -}}
{{- $groups := list -}}
{{- range $group := ($prefixed | fromYaml).groups -}}
{{- $rules := list -}}
{{- range $group.rules -}}
{{- /* Nobody follows a single pod, and that is no fault. */ -}}
{{- $is_alone := and (eq .alert "WaldNoStandBy") (lt (int $.root.Values.replicaCount) 2) -}}
{{- if not (or $is_alone (has .alert $values.disabled)) -}}
{{- $changed := get $values.overrides .alert | default dict -}}
{{- $labelled := merge (dict "labels" (merge dict ($changed.labels | default dict) $values.alertLabels .labels)) (omit $changed "labels") . -}}
{{- $rules = append $rules $labelled -}}
{{- end -}}
{{- end -}}
{{- $groups = append $groups (merge (dict "rules" $rules) $group) -}}
{{- end -}}
{{- toYaml (dict "groups" $groups) -}}
{{- end }}
