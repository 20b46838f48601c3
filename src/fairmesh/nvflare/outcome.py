"""How a site, and a job, can end; and where the server writes it."""

WAITING, RUNNING = "waiting", "running"
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
ENDED = (FINISHED, INTERRUPTED, FAILED)
OUTCOME = "fairmesh.json"  # in the server's folder of the job
