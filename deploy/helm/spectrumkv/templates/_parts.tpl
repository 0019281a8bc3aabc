{{/* The parts of a pod with a daemon. Each takes the chart's context: . here, .Subcharts.spectrumkv in a chart of yours. */}}

{{/* Name of the chart's objects. */}}
{{- define "spectrumkv.name" -}}
{{ .Release.Name }}-spectrumkv
{{- end }}

{{/* Configuration of the daemon as it is mounted. */}}
{{- define "spectrumkv.config" -}}
{{ toYaml (merge (dict "drain" (dict "timeout_ms" (printf "%ds" (int .Values.termination.drainSeconds)))) .Values.config) }}
{{- end }}

{{/* Labels of the pod, besides your own and spectrumkv.io/role. */}}
{{- define "spectrumkv.podLabels" -}}
spectrumkv.io/peer: "true"
{{- end }}

{{/* Annotations of the pod: a new configuration starts new pods. */}}
{{- define "spectrumkv.podAnnotations" -}}
spectrumkv.io/config: {{ include "spectrumkv.config" . | sha256sum }}
{{- end }}

{{/* Keys of the pod's spec. The worker waits 5 s longer than the drain; the sidecar has 10 s after the worker's end. */}}
{{- define "spectrumkv.podSpec" -}}
terminationGracePeriodSeconds: {{ add .Values.termination.drainSeconds 5 .Values.termination.workerSeconds 10 }}
securityContext:
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
{{- end }}

{{/* Items of the worker's env. */}}
{{- define "spectrumkv.workerEnv" -}}
- name: SPECTRUMKV_WORKER_SOCKET
  value: /run/spectrumkv/worker.sock
{{- end }}

{{/* Items of the worker's volumeMounts. */}}
{{- define "spectrumkv.workerMounts" -}}
- name: spectrumkv-run
  mountPath: /run/spectrumkv
- name: spectrumkv-shm
  mountPath: /dev/shm
{{- end }}

{{/* The worker's lifecycle. */}}
{{- define "spectrumkv.workerLifecycle" -}}
preStop:
  exec:
    command:
      - sh
      - -c
      - 'n=0; until [ -e /run/spectrumkv/drained ] || [ "$n" -ge {{ add .Values.termination.drainSeconds 5 }} ]; do sleep 1; n=$((n + 1)); done'
{{- end }}

{{/* An item of initContainers, the first. */}}
{{- define "spectrumkv.sidecar" -}}
- name: spectrumkvd
  image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args: [--config, /etc/spectrumkv/spectrumkvd.yaml]
  env:
    - name: SPECTRUMKV_ADMIN_SOCKET
      value: /run/spectrumkv-admin/admin.sock
    - name: SPECTRUMKV_CODEC_THREADS
      valueFrom:
        resourceFieldRef:
          resource: limits.cpu
          divisor: "1"
  ports:
    - name: skv-peer
      containerPort: 7420
    - name: skv-health
      containerPort: 7421
    - name: skv-metrics
      containerPort: 7422
  resources:
    requests: &resources
      cpu: {{ .Values.resources.cpu | quote }}
      memory: {{ .Values.resources.memory }}
    limits: *resources
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
    seccompProfile:
      type: RuntimeDefault
  startupProbe:
    grpc:
      port: 7421
      service: readiness
    periodSeconds: 1
    timeoutSeconds: 3
    failureThreshold: 60
  readinessProbe:
    grpc:
      port: 7421
      service: readiness
    periodSeconds: 5
    timeoutSeconds: 3
  livenessProbe:
    grpc:
      port: 7421
      service: liveness
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  lifecycle:
    postStart:
      exec:
        command: [rm, -f, /run/spectrumkv/drained]
    preStop:
      exec:
        command:
          - sh
          - -c
          - spectrumkvctl drain --wait --drain-timeout {{ .Values.termination.drainSeconds }}; touch /run/spectrumkv/drained
  volumeMounts:
    - name: spectrumkv-run
      mountPath: /run/spectrumkv
    - name: spectrumkv-admin
      mountPath: /run/spectrumkv-admin
    - name: spectrumkv-shm
      mountPath: /dev/shm
    - name: spectrumkv-state
      mountPath: /var/lib/spectrumkv
    - name: spectrumkv-config
      mountPath: /etc/spectrumkv
      readOnly: true
    - name: spectrumkv-tls
      mountPath: /etc/spectrumkv-tls
      readOnly: true
{{- end }}

{{/* Items of the pod's volumes. */}}
{{- define "spectrumkv.volumes" -}}
- name: spectrumkv-run
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: spectrumkv-admin
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: spectrumkv-shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory.sizeLimit }}
- name: spectrumkv-state
  emptyDir:
    sizeLimit: 16Mi
- name: spectrumkv-config
  configMap:
    name: {{ include "spectrumkv.name" . }}
- name: spectrumkv-tls
  projected:
    defaultMode: 288
    sources:
      - secret:
          name: {{ .Values.tls.secretName }}
          items:
            - key: tls.crt
              path: tls.crt
            - key: tls.key
              path: tls.key
            - key: ca.crt
              path: ca.crt
{{- end }}

{{/* A Deployment: dict "top" . "name" NAME "worker" (an entry of .Values.workers). */}}
{{- define "spectrumkv.deployment" -}}
{{- $full := printf "%s-%s" .top.Release.Name .name }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $full }}
  labels:
    spectrumkv.io/role: {{ .worker.role }}
spec:
  {{- if hasKey .worker "replicas" }}
  replicas: {{ int .worker.replicas }}
  {{- end }}
  selector:
    matchLabels:
      app: {{ $full }}
  template:
    metadata:
      labels:
        app: {{ $full }}
        spectrumkv.io/role: {{ .worker.role }}
        {{- include "spectrumkv.podLabels" .top | nindent 8 }}
      annotations:
        {{- include "spectrumkv.podAnnotations" .top | nindent 8 }}
    spec:
      {{- include "spectrumkv.podSpec" .top | nindent 6 }}
      initContainers:
        {{- include "spectrumkv.sidecar" .top | nindent 8 }}
      containers:
        - name: worker
          image: {{ .worker.image | quote }}
          {{- range $key := list "command" "args" "ports" "resources" "securityContext" }}
          {{- with index $.worker $key }}
          {{ $key }}:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          {{- end }}
          env:
            {{- with .worker.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
            {{- include "spectrumkv.workerEnv" .top | nindent 12 }}
          volumeMounts:
            {{- include "spectrumkv.workerMounts" .top | nindent 12 }}
          lifecycle:
            {{- include "spectrumkv.workerLifecycle" .top | nindent 12 }}
      volumes:
        {{- include "spectrumkv.volumes" .top | nindent 8 }}
{{- end }}
