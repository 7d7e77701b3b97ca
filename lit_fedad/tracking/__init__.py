"""Experiment tracking with MLflow, for which training never waits.

Every record is first written to a journal in the run's own folder; a daemon thread reads the journal and delivers
it to the tracking server in order. The journal is therefore the queue, it tells a resumed run what was logged already,
and `lit_fedad.tracking.sender.deliver` sends it later if the server was away:

```
<folder>/tracking/journal.jsonl    one record a line, in the order of logging
<folder>/tracking/sent.json        how many records one server has: {"uri" (without its user), "run_id", "delivered"}
<folder>/tracking/rejected.jsonl   records that the server refused while it accepted others, with the cause
```

A record may be sent twice and is stored once: records carry their own time, and a run is found again by a tag that
names its journal. A crash at any point therefore costs a repetition and loses nothing.

Data flows one way, from `tracker` (what a run logs) through `journal` (the file, of values that MLflow accepts) and
`sender` (the thread) to `server` (the only module that imports MLflow). `reading` returns what a server knows of runs.
"""
