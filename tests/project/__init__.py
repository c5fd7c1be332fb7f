"""The sources, documents, deployment files, examples and benchmarks themselves."""
