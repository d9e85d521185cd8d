"""More than one engine: plans of replicas and of prefill and decode pools."""
