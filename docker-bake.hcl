# Both images: docker buildx bake; one of them: docker buildx bake cuda
# To push them, with an SBOM of all that is in them:
#   REGISTRY=registry.example/ REVISION=$(git rev-parse HEAD) docker buildx bake --push --sbom=true --provenance=mode=max

variable "REGISTRY" {
  default = ""
}

variable "VERSION" {
  default = "0.1.0"
}

variable "REVISION" {
  default = ""
}

group "default" {
  targets = ["cpu", "cuda"]
}

target "image" {
  args = {
    VERSION  = VERSION
    REVISION = REVISION
  }
}

target "cpu" {
  inherits = ["image"]
  args     = { VARIANT = "cpu", EXTRAS = "otlp,pdf" }
  tags     = ["${REGISTRY}quire:cpu", "${REGISTRY}quire:${VERSION}-cpu"]
}

target "cuda" {
  inherits = ["image"]
  # With ray, for scripts/run_cluster.sh.
  args = { VARIANT = "cu130", EXTRAS = "ray,otlp,pdf" }
  tags = ["${REGISTRY}quire:cuda", "${REGISTRY}quire:${VERSION}-cuda"]
}
