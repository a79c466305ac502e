{{/* Names. Everything is named after the release alone: <release>-allocator and so on. */}}

{{/*
The namespace of the API keys. It moves only when its owner says so: keys of an earlier version stay in the release's
namespace, and once this release has made the other one, keys that are left in the release's namespace do not bring it back.
*/}}
{{- define "berth.keysNamespace" -}}
{{- $own := printf "%s-keys" .Release.Namespace }}
{{- $earlier := dict }}
{{- if not .Values.api.keysNamespace }}
{{- $made := dig "metadata" "annotations" dict (lookup "v1" "Namespace" "" $own) }}
{{- $mine := and (eq (get $made "meta.helm.sh/release-name") .Release.Name) (eq (get $made "meta.helm.sh/release-namespace") .Release.Namespace) }}
{{- range (lookup "v1" "Secret" .Release.Namespace "").items }}
{{- if and (not $mine) (eq (default "" .type) "berth.sh/api-key") }}
{{- $_ := set $earlier "keys" "yes" }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.api.keysNamespace }}{{ .Values.api.keysNamespace }}
{{- else if $earlier }}{{ .Release.Namespace }}
{{- else }}{{ $own }}
{{- end }}
{{- end }}

{{- define "berth.accessKeySecret" -}}
{{ default (printf "%s-access-key" .Release.Name) .Values.api.accessKeySecret }}
{{- end }}

{{- define "berth.allocatorTLSSecret" -}}
{{ if eq .Values.controlTLS.mode "secret" }}{{ .Values.controlTLS.secret.allocator }}{{ else }}{{ .Release.Name }}-control-allocator{{ end }}
{{- end }}

{{- define "berth.routerTLSSecret" -}}
{{ if eq .Values.controlTLS.mode "secret" }}{{ .Values.controlTLS.secret.router }}{{ else }}{{ .Release.Name }}-control-router{{ end }}
{{- end }}

{{- define "berth.egressTLSSecret" -}}
{{ if eq .Values.controlTLS.mode "secret" }}{{ .Values.controlTLS.secret.egress }}{{ else }}{{ .Release.Name }}-control-egress{{ end }}
{{- end }}

{{/* The roles on the control stream that need a certificate, as a list in JSON. */}}
{{- define "berth.controlRoles" -}}
{{ ternary (list "allocator" "router" "egress") (list "allocator" "router") .Values.egress.enabled | toJson }}
{{- end }}

{{/* For the chart's own authority, where it has one. No pod mounts it. */}}
{{- define "berth.authoritySecret" -}}
{{ .Release.Name }}-control-ca
{{- end }}

{{/*
Labels. A Deployment's selector can never be changed, so that it holds nothing
but these three.
*/}}
{{- define "berth.selectorLabels" -}}
app.kubernetes.io/name: berth
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "berth.labels" -}}
{{ include "berth.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The name of an image. Arguments: root, image. */}}
{{- define "berth.imageName" -}}
{{ with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image.repository }}:{{ coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion }}
{{- end }}

{{/* The image of a container, and when to pull it. Arguments: those of berth.imageName. */}}
{{- define "berth.image" -}}
image: {{ include "berth.imageName" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}

{{/*
What a pod may do: nothing special (Pod Security Standard "restricted"). The user
is the images' own; the group lets it read mounted Secrets, which nobody else
may, and two containers of one pod share a socket only as the same user.
*/}}
{{- define "berth.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "berth.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where pods run. Arguments: root, component, values. */}}
{{- define "berth.placement" -}}
# Over zones and nodes as evenly as possible; rather two on one node than one alone. No constraint for nodes: the
# scheduler would not count it where nodes have no zone.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "berth.selectorLabels" . | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "berth.selectorLabels" . | nindent 14 }}
          matchLabelKeys: [pod-template-hash]
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/*
The pods' main address family, as text that is empty or not: all listeners and
advertised addresses are of that family.
*/}}
{{- define "berth.ipv6" -}}
{{ if contains ":" (default "" (first .Values.podCIDRs)) }}yes{{ end }}
{{- end }}

{{- define "berth.podIP" -}}
{{ if include "berth.ipv6" . }}[$(POD_IP)]{{ else }}$(POD_IP){{ end }}
{{- end }}

{{- define "berth.anyIP" -}}
{{ if include "berth.ipv6" . }}[::]{{ else }}0.0.0.0{{ end }}
{{- end }}

{{/*
Rules of NetworkPolicies. Who may connect to the pods of pools, on any port: the gateways, and the allocators, which call
postStart hooks and agents. Other sandboxes may not.
*/}}
{{- define "berth.fromBerth" -}}
- from:
    {{- range $component := list "gateway" "allocator" }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $.Release.Namespace }}
      podSelector:
        matchLabels:
          {{- include "berth.selectorLabels" (dict "root" $ "component" $component) | nindent 10 }}
    {{- end }}
{{- end }}

{{/* The cluster's DNS. */}}
{{- define "berth.toDNS" -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}

{{/* The number that an IPv4 address is. */}}
{{- define "berth.number" -}}
{{- $n := 0 }}
{{- range splitList "." . }}{{ $n = add (mul $n 256) (int .) }}{{ end }}
{{- $n }}
{{- end }}

{{/* Text that is not empty if a range of IPv4 addresses lies in another one. Arguments: a list of the two. */}}
{{- define "berth.within" -}}
{{- $inner := splitList "/" (index . 0) }}
{{- $outer := splitList "/" (index . 1) }}
{{- if not (or (contains ":" (first $inner)) (contains ":" (first $outer)) (lt (int (last $inner)) (int (last $outer)))) }}
{{- $size := 1 }}
{{- range until (int (sub 32 (int (last $outer)))) }}{{ $size = mul $size 2 }}{{ end }}
{{- if eq (div (int64 (include "berth.number" (first $inner))) $size) (div (int64 (include "berth.number" (first $outer))) $size) }}yes{{ end }}
{{- end }}
{{- end }}

{{/* All addresses but those of pods and those that the values except. */}}
{{- define "berth.toInternet" -}}
{{- $policy := .Values.networkPolicy.sandboxes }}
{{- $except := concat .Values.podCIDRs $policy.except $policy.extraExcept | uniq }}
- to:
    {{- range $all := list "0.0.0.0/0" "::/0" }}
    - ipBlock:
        cidr: {{ $all | quote }}
        {{- $family := list }}
        {{- range $except }}
        {{- if eq (contains ":" .) (contains ":" $all) }}
        {{- $family = append $family . }}
        {{- end }}
        {{- end }}
        {{- with $family }}
        except:
          {{- range . }}
          - {{ . | quote }}
          {{- end }}
        {{- end }}
    {{- end }}
{{- end }}

{{/*
The host of console.url.
*/}}
{{- define "berth.consoleHost" -}}
{{ regexReplaceAll "^https?://([^:/]*).*$" .Values.console.url "${1}" }}
{{- end }}

{{/*
The HTTPRoute and the Ingress that lead hosts to a Service, where values ask for them.
*/}}
{{- define "berth.routes" }}
{{- $service := printf "%s-%s" .root.Release.Name .name }}
{{- $namespace := .root.Release.Namespace }}
{{- $labels := include "berth.labels" (pick . "root" "component") }}
{{- $port := .values.service.port }}
{{- $hosts := .hosts }}
{{- with .values.httpRoute }}
{{- if .parentRefs }}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ $service }}
  namespace: {{ $namespace }}
  labels:
    {{- $labels | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  parentRefs:
    {{- toYaml .parentRefs | nindent 4 }}
  hostnames:
    {{- range $hosts }}
    - {{ . | quote }}
    {{- end }}
  rules:
    # No bound: requests may be streams and WebSockets.
    - timeouts: {request: 0s}
      backendRefs:
        - name: {{ $service }}
          port: {{ $port }}
{{- end }}
{{- end }}
{{- with .values.ingress }}
{{- if .enabled }}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $service }}
  namespace: {{ $namespace }}
  labels:
    {{- $labels | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- with .tlsSecret }}
  tls:
    - secretName: {{ . }}
      hosts:
        {{- range $hosts }}
        - {{ . | quote }}
        {{- end }}
  {{- end }}
  rules:
    {{- range $hosts }}
    - host: {{ . | quote }}
      http:
        paths:
          - path: /
            pathType: Prefix
            backend:
              service:
                name: {{ $service }}
                port: {name: http}
    {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
What values.schema.json cannot say. All mistakes at once, each with what to do.
*/}}
{{- define "berth.validate" -}}
{{- $errors := list }}
{{- if not .Values.publicURL }}
{{- $errors = append $errors "publicURL: required: where clients reach the gateway, for example --set publicURL=https://sandbox.example.com" }}
{{- else if not (regexMatch "^https?://[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*(:[0-9]{1,5})?$" .Values.publicURL) }}
{{- $errors = append $errors (printf "publicURL: %s must be http:// or https://, a domain in lower case, and a port if it is not the usual one, and nothing else: for example https://sandbox.example.com" .Values.publicURL) }}
{{- end }}
{{- with .Values.console.url }}
{{- if not $.Values.console.enabled }}
{{- $errors = append $errors "console.url: needs console.enabled" }}
{{- end }}
{{- if not (regexMatch "^https://[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*(:[0-9]{1,5})?$" .) }}
{{- $errors = append $errors (printf "console.url: %s must be https://, a host in lower case, and a port if it is not the usual one: for example https://console.example.com" .) }}
{{- else }}
{{- $host := include "berth.consoleHost" $ }}
{{- $domain := regexReplaceAll "^https?://([^:/]*).*$" $.Values.publicURL "${1}" }}
{{- if or (eq $host $domain) (hasSuffix (printf ".%s" $domain) $host) }}
{{- $errors = append $errors (printf "console.url: its host must not be %s or below it, because pages of sandboxes there are of the same site: for example https://berth-console.example.com" $domain) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $path, $asked := dict "console.httpRoute" .Values.console.httpRoute.parentRefs "console.ingress" .Values.console.ingress.enabled }}
{{- if and $asked (not (and $.Values.console.enabled $.Values.console.url)) }}
{{- $errors = append $errors (printf "%s: needs console.enabled, and the host in console.url: for example https://console.example.com" $path) }}
{{- end }}
{{- end }}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)?[smh])+$" (toString .Values.maxStale)) }}
{{- $errors = append $errors (printf "maxStale: %v must be a duration of 1 s or more with its unit, for example 15m or 1h30m" .Values.maxStale) }}
{{- end }}
{{- if not .Values.podCIDRs }}
{{- $errors = append $errors "podCIDRs: required: the ranges of the cluster's pod addresses, for example --set 'podCIDRs={10.244.0.0/16}'" }}
{{- end }}
{{- $gateway := .Values.gateway }}
{{- $sandboxes := .Values.sandboxes.namespace }}
{{- range $path, $ranges := dict
  "podCIDRs" .Values.podCIDRs "egress.outsideCIDRs" .Values.egress.outsideCIDRs "gateway.service.loadBalancerSourceRanges" $gateway.service.loadBalancerSourceRanges
  "networkPolicy.sandboxes.except" .Values.networkPolicy.sandboxes.except "networkPolicy.sandboxes.extraExcept" .Values.networkPolicy.sandboxes.extraExcept }}
{{- range $ranges }}
{{- if not (regexMatch "^([0-9]{1,3}(\\.[0-9]{1,3}){3}/([1-9]|[12][0-9]|3[0-2])|[0-9a-f]{0,4}(:[0-9a-f]{0,4}){2,7}/([1-9]|[1-9][0-9]|1[01][0-9]|12[0-8]))$" .) }}
{{- $errors = append $errors (printf "%s: %s must be a range of addresses, and not all of them: for example 10.244.0.0/16 or fd00:10:244::/56" $path .) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $path, $name := dict
  "api.tlsSecret" .Values.api.tlsSecret "api.accessKeySecret" .Values.api.accessKeySecret "gateway.tlsSecret" $gateway.tlsSecret
  "gateway.ingress.tlsSecret" $gateway.ingress.tlsSecret "gateway.ingress.className" $gateway.ingress.className
  "console.ingress.tlsSecret" .Values.console.ingress.tlsSecret "console.ingress.className" .Values.console.ingress.className
  "controlTLS.secret.allocator" .Values.controlTLS.secret.allocator "controlTLS.secret.router" .Values.controlTLS.secret.router
  "controlTLS.secret.egress" .Values.controlTLS.secret.egress
  "allocator.priorityClassName" .Values.allocator.priorityClassName "gateway.priorityClassName" $gateway.priorityClassName
  "egress.priorityClassName" .Values.egress.priorityClassName
  "sandboxes.serviceAccount" .Values.sandboxes.serviceAccount }}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$" $name) }}
{{- $errors = append $errors (printf "%s: %s is no name of an object, which has lower case letters, digits, - and . and begins and ends with a letter or a digit" $path $name) }}
{{- end }}
{{- end }}
{{- range $i, $name := .Values.image.pullSecrets }}
{{- if not (regexMatch "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$" $name) }}
{{- $errors = append $errors (printf "image.pullSecrets: %q is no name of a Secret" $name) }}
{{- end }}
{{- end }}
{{- range $path, $name := dict "api.keysNamespace" .Values.api.keysNamespace "sandboxes.namespace" $sandboxes }}
{{- if not (regexMatch "^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$" $name) }}
{{- $errors = append $errors (printf "%s: %s is no name of a namespace, which has at most 63 lower case letters, digits and -" $path $name) }}
{{- end }}
{{- end }}
{{- if not (regexMatch "^([a-zA-Z0-9]+([.-]+[a-zA-Z0-9]+)*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*)?$" .Values.image.registry) }}
{{- $errors = append $errors (printf "image.registry: %s must be a host, and a path if you like, without https:// and without a / at the end: for example registry.example.com/berth" .Values.image.registry) }}
{{- end }}
{{- $tags := dict "image.tag" .Values.image.tag }}
{{- range $path, $image := dict "allocator.image" .Values.allocator.image "agent.image" .Values.agent.image "router.image" .Values.router.image "envoy.image" .Values.envoy.image }}
{{- if not (regexMatch "^([a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$" $image.repository) }}
{{- $errors = append $errors (printf "%s.repository: %q must be the name of an image without its tag: for example berth/router" $path $image.repository) }}
{{- end }}
{{- $_ := set $tags (printf "%s.tag" $path) $image.tag }}
{{- end }}
{{- range $path, $tag := $tags }}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(@sha256:[0-9a-f]{64})?)?$" $tag) }}
{{- $errors = append $errors (printf "%s: %s must be a tag, and may have a digest: for example 1.2.3 or 1.2.3@sha256: and 64 digits of 0-9a-f" $path $tag) }}
{{- end }}
{{- end }}
{{- if not .Values.envoy.image.tag }}
{{- $errors = append $errors "envoy.image.tag: required: Envoy's version is not the chart's" }}
{{- end }}
{{- range $path, $flags := dict "allocator.extraArgs" .Values.allocator.extraArgs "router.extraArgs" .Values.router.extraArgs "egress.extraArgs" .Values.egress.extraArgs "envoy.configArgs" .Values.envoy.configArgs }}
{{- range $flags }}
{{- if not (regexMatch "^--[a-z]" .) }}
{{- $errors = append $errors (printf "%s: %s must be a flag with its value in one string: for example --cache-size=500000" $path .) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $gateway.hosts }}
{{- if or (gt (len .) 189) (not (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$" .)) }}
{{- $errors = append $errors (printf "gateway.hosts: %s must be a DNS name in lower case, without * and without a port" .) }}
{{- end }}
{{- end }}
{{- if not (regexMatch "^(http://([a-zA-Z0-9.-]+|\\[[0-9a-f:]+\\]):[0-9]{1,5})?$" .Values.tracing.to) }}
{{- $errors = append $errors (printf "tracing.to: %s must be http://host:port of a collector's gRPC receiver, for example http://otel-collector.observability:4317" .Values.tracing.to) }}
{{- end }}
{{- if not (regexMatch "^((s3|gs|azblob)://[^/?]+([?].*)?)?$" .Values.snapshots.store) }}
{{- $errors = append $errors (printf "snapshots.store: %s must be s3://BUCKET?region=REGION, gs://BUCKET or azblob://CONTAINER" .Values.snapshots.store) }}
{{- end }}
{{- if not (regexMatch "^([0-9]+[hms])+$" .Values.snapshots.keep) }}
{{- $errors = append $errors (printf "snapshots.keep: %q must be a time such as 720h, or 0s for no end" .Values.snapshots.keep) }}
{{- end }}
{{- if and (gt (int64 .Values.envoy.maxHeapBytes) 0) (lt (int64 .Values.envoy.maxHeapBytes) 67108864) }}
{{- $errors = append $errors (printf "envoy.maxHeapBytes: %d is too little for Envoy: 67108864 (64 MiB) or more, or 0 for no bound" (int64 .Values.envoy.maxHeapBytes)) }}
{{- end }}
{{- if and $gateway.maxReplicas (lt (int $gateway.maxReplicas) (int $gateway.replicas)) }}
{{- $errors = append $errors (printf "gateway.maxReplicas: %d is less than gateway.replicas, %d, which is the fewest that the autoscaler keeps: raise it, or set it to 0 for no autoscaler" (int $gateway.maxReplicas) (int $gateway.replicas)) }}
{{- end }}
{{- if ne $gateway.service.type "LoadBalancer" }}
{{- range $name := list "loadBalancerClass" "loadBalancerSourceRanges" }}
{{- if index $gateway.service $name }}
{{- $errors = append $errors (printf "gateway.service.%s: has no meaning with gateway.service.type %s" $name $gateway.service.type) }}
{{- end }}
{{- end }}
{{- end }}
{{- if gt (len .Release.Name) 40 }}
{{- $errors = append $errors (printf "release name %s: at most 40 characters, because the names of Services are made from it" .Release.Name) }}
{{- end }}
{{- if contains "." .Release.Name }}
{{- $errors = append $errors (printf "release name %s: no dots, because the names of Services are made from it" .Release.Name) }}
{{- end }}
{{- range $path, $service := dict "api.service" .Values.api.service "console.service" .Values.console.service "gateway.service" .Values.gateway.service }}
{{- if eq $service.type "ClusterIP" }}
{{- if $service.nodePort }}
{{- $errors = append $errors (printf "%s.nodePort: %v has no meaning with %s.type ClusterIP: set the type to NodePort or LoadBalancer, or the port to 0" $path $service.nodePort $path) }}
{{- end }}
{{- if eq (default "Cluster" $service.externalTrafficPolicy) "Local" }}
{{- $errors = append $errors (printf "%s.externalTrafficPolicy: Local has no meaning with %s.type ClusterIP" $path $path) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not $sandboxes }}
{{- $errors = append $errors "sandboxes.namespace: required: an existing namespace other than the release's, for example --set sandboxes.namespace=sandboxes" }}
{{- else if eq $sandboxes .Release.Namespace }}
{{- $errors = append $errors (printf "sandboxes.namespace: %s is the release's namespace, which holds the keys of the control stream, and pods of pools could mount them: name another existing namespace (--set sandboxes.namespace=%s-sandboxes), or install the release in another one (--namespace berth-system)" $sandboxes $sandboxes) }}
{{- end }}
{{- if eq (include "berth.keysNamespace" . | trim) $sandboxes }}
{{- $errors = append $errors (printf "api.keysNamespace: %s is the namespace of the sandboxes, and who creates pods there must not make keys: name another one, or none" $sandboxes) }}
{{- end }}
{{- if .Values.crds.install }}
{{- range $name := list "sandboxpools.berth.sh" "sandboxes.berth.sh" "journalslots.berth.sh" "eventsegments.berth.sh" "eventwebhooks.berth.sh" }}
{{- if dig "metadata" "deletionTimestamp" "" (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name) }}
{{- $errors = append $errors (printf "crds.install: the CRD %s is being deleted, and its objects with it: wait until it has gone (kubectl get crd %s), and try again. Objects that hold it up have finalizers: docs/operations.md, Uninstall" $name $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- $own := .Values.controlTLS.secret }}
{{- if eq .Values.controlTLS.mode "secret" }}
{{- range $name := include "berth.controlRoles" . | fromJsonArray }}
{{- if not (index $own $name) }}
{{- $errors = append $errors (printf "controlTLS.secret.%s: required with controlTLS.mode secret: the name of a Secret with tls.crt, tls.key and ca.crt" $name) }}
{{- end }}
{{- end }}
{{- else if or $own.allocator $own.router $own.egress }}
{{- $errors = append $errors (printf "controlTLS.secret: not used with controlTLS.mode %s: set controlTLS.mode to secret, or leave the names empty" .Values.controlTLS.mode) }}
{{- end }}
{{- if .Values.egress.enabled }}
{{- if not .Values.networkPolicy.enabled }}
{{- $errors = append $errors "egress.enabled: without NetworkPolicies the pods of pools with egress.mode Gateway reach everything: set networkPolicy.enabled=true, or egress.enabled=false" }}
{{- end }}
{{- if $own.egress }}
{{- if eq $own.egress $own.router }}
{{- $errors = append $errors (printf "controlTLS.secret.egress: %s is the Secret of the gateways, and the egress gateways must not have what opens sandboxes: name another one with a certificate for egress.berth.sh" $own.egress) }}
{{- end }}
{{- end }}
{{- $maxStale := 0.0 }}
{{- range regexFindAll "[0-9.]+[smh]" (toString .Values.maxStale) -1 }}
{{- $maxStale = addf $maxStale (mulf (trimAll "smh" . | float64) (get (dict "s" 1.0 "m" 60.0 "h" 3600.0) (trimAll "0123456789." .))) }}
{{- end }}
{{- if and $maxStale (lt $maxStale 30.0) }}
{{- $errors = append $errors (printf "maxStale: %v is less than the 30 s for which egress gateways use rules, and the allocators would refuse them: set it to 30s or more, or egress.enabled=false" .Values.maxStale) }}
{{- end }}
{{- range $outside := .Values.egress.outsideCIDRs }}
{{- range concat $.Values.podCIDRs $.Values.networkPolicy.sandboxes.extraExcept }}
{{- if include "berth.within" (list $outside .) }}
{{- $errors = append $errors (printf "egress.outsideCIDRs: %s lies in %s, which podCIDRs or networkPolicy.sandboxes.extraExcept close, and they win: leave it out" $outside .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not (hasPrefix "/" .Values.egress.caFile) }}
{{- $errors = append $errors (printf "egress.caFile: %q must be an absolute path in Envoy's image" .Values.egress.caFile) }}
{{- end }}
{{- $heap := int64 .Values.envoy.maxHeapBytes }}
{{- $fit := div (mul $heap 9) 1310720 }}
{{- if and $heap (gt (int64 .Values.egress.maxConnections) $fit) }}
{{- $errors = append $errors (printf "egress.maxConnections: %d connections of 128 KiB need more than nine tenths of envoy.maxHeapBytes, %d: set at most %d, or raise envoy.maxHeapBytes and the memory of envoy.resources" (int64 .Values.egress.maxConnections) $heap $fit) }}
{{- end }}
{{- end }}
{{- if .Values.mcp.enabled }}
{{- if not .Values.gateway.api }}
{{- $errors = append $errors "mcp.enabled: it is served at api.<domain>/mcp, beside the API: set gateway.api=true, or mcp.enabled=false" }}
{{- end }}
{{- if .Values.api.tlsSecret }}
{{- $errors = append $errors "mcp.enabled: the gateway would send it API keys in plain HTTP, and api.tlsSecret says that they are encrypted in the cluster: leave api.tlsSecret empty, or set mcp.enabled=false and run \"berth mcp\" beside its clients" }}
{{- end }}
{{- if .Values.gateway.proxyProtocol }}
{{- $errors = append $errors "mcp.enabled: it connects to the gateway without the PROXY protocol, which gateway.proxyProtocol asks of everybody: set mcp.enabled=false and run \"berth mcp\" beside its clients" }}
{{- end }}
{{- end }}
{{- if and .Values.gateway.api .Values.networkPolicy.enabled .Values.networkPolicy.api.from }}
{{- $errors = append $errors "networkPolicy.api.from: bounds who can call the API, but gateway.api serves it to all clients of the gateway: set gateway.api=false, or leave networkPolicy.api.from empty" }}
{{- end }}
{{- if $errors }}
{{- fail (printf "\n\n%s\n" (join "\n" $errors)) }}
{{- /* For "helm lint", where fail only writes a line of its log: what does not exist is an error there too. */}}
{{- include (join "; " $errors) . }}
{{- end }}
{{- end }}
