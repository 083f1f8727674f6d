"""The engine: admission, the step loop and reporting; `process` runs it beside its callers."""
