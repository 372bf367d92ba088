{{/* Labels that say where an object is from. */}}
{{- define "cproxy.labels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Views of the relay: the values, else those of the overlay. */}}
{{- define "cproxy.views" -}}
{{- if .Values.relay.views }}{{ toYaml .Values.relay.views }}{{ else }}{{ .Files.Get "files/views.yaml" }}{{ end }}
{{- end }}

{{/* Name with which pods of the relay are selected. */}}
{{- define "cproxy.relay" -}}
app.kubernetes.io/name: cproxy-relay
{{- end }}
