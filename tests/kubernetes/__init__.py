"""The files of deploy/kubernetes: what they say, whether Kubernetes takes them, and whether their pods run."""
