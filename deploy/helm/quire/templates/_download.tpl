{{- define "quire.download" -}}
{{- if .Values.download.enabled }}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "quire.name" . }}-download
  labels:
    {{- include "quire.chartLabels" . | nindent 4 }}
    app.kubernetes.io/name: {{ include "quire.name" . }}-download
spec:
  backoffLimit: 10
  # Then it may be applied again with another image; a model that is there is not downloaded again.
  ttlSecondsAfterFinished: 3600
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {{ include "quire.name" . }}-download
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      restartPolicy: OnFailure
      securityContext:
        {{- toYaml .Values.podSecurityContext | nindent 8 }}
      {{- with include "quire.serviceAccount" . | trim }}
      serviceAccountName: {{ . }}
      {{- end }}
      {{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" }}
      {{- with (index $.Values $key) }}
      {{ $key }}:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
      containers:
        - name: download
          {{- include "quire.image" . | nindent 10 }}
          # The folder gets its name when it is complete. A download that was interrupted is continued.
          command:
            - sh
            - -c
            - test -d "/models/$FOLDER" || { hf download "$MODEL" --local-dir "/models/.$FOLDER" && mv "/models/.$FOLDER" "/models/$FOLDER"; }
          env:
            {{- $own := include "quire.downloadEnv" . | trim }}
            {{- include "quire.extend" (dict "own" $own "value" "env" "more" .Values.env) | nindent 12 }}
          {{- with .Values.envFrom }}
          envFrom:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          resources:
            requests:
              cpu: "1"
              memory: 2Gi
            limits:
              memory: 4Gi
          securityContext:
            {{- toYaml .Values.securityContext | nindent 12 }}
          volumeMounts:
            - name: models
              mountPath: /models
            - name: cache
              mountPath: /cache
            - name: tmp
              mountPath: /tmp
            {{- with .Values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: models
          persistentVolumeClaim:
            claimName: {{ include "quire.claim" . }}
        - {{- include "quire.cacheVolume" . | nindent 10 }}
        - name: tmp
          emptyDir: {}
        {{- with .Values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}
{{- end }}

{{- define "quire.downloadEnv" -}}
- name: MODEL
  value: {{ .Values.download.model | quote }}
- name: FOLDER
  value: {{ .Values.download.folder | quote }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secret }}
      key: hf-token
      optional: true
{{- end }}
