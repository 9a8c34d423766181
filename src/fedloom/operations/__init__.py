"""What whoever runs a federation looks at: logs, the audit log, health and metrics. No wire is known here."""
