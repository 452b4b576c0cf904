"""RBLN vLLM: a vLLM hardware plugin for static-shape accelerators."""
