-- Which files and batches there are.
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, key_id INTEGER, created_at INTEGER, bytes INTEGER,
  filename TEXT, purpose TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS files_of ON files (key_id, created_at, id, bytes);
CREATE INDEX IF NOT EXISTS files_by_age ON files (created_at);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, key_id INTEGER, created_at INTEGER, expires_at INTEGER,
  input_file_id TEXT, ended_at INTEGER DEFAULT 0, answer_bytes INTEGER DEFAULT 0, cancelled INTEGER DEFAULT 0,
  record BLOB);
CREATE INDEX IF NOT EXISTS batches_of ON batches (key_id, created_at, id);
CREATE INDEX IF NOT EXISTS batches_ended ON batches (ended_at) WHERE ended_at > 0;
CREATE INDEX IF NOT EXISTS batches_open ON batches (key_id, created_at, id) WHERE ended_at = 0;
CREATE INDEX IF NOT EXISTS batches_input ON batches (input_file_id) WHERE ended_at = 0;
