-- Responses with state; `held`: what each key has.
CREATE TABLE IF NOT EXISTS responses (key_id INTEGER, id TEXT, created_at INTEGER, bytes INTEGER, previous TEXT,
  input BLOB, record BLOB);
CREATE UNIQUE INDEX IF NOT EXISTS responses_by_id ON responses (key_id, id);
CREATE INDEX IF NOT EXISTS responses_of ON responses (key_id, created_at);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created_at);
CREATE TABLE IF NOT EXISTS held (key_id INTEGER PRIMARY KEY, number INTEGER, bytes INTEGER);
CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON responses BEGIN
  INSERT INTO held VALUES (new.key_id, 1, new.bytes)
    ON CONFLICT (key_id) DO UPDATE SET number = number + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS response_deleted AFTER DELETE ON responses BEGIN
  UPDATE held SET number = number - 1, bytes = bytes - old.bytes WHERE key_id = old.key_id;
  DELETE FROM held WHERE key_id = old.key_id AND number = 0;
END;
