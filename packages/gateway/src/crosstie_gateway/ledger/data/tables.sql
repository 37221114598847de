-- A store of keys and usage. {identity}: how a column says that it numbers its rows.

CREATE TABLE crosstie_meta (name TEXT PRIMARY KEY, value BIGINT NOT NULL);

CREATE TABLE crosstie_keys (
  id {identity}, public_id TEXT NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE, digest TEXT NOT NULL,
  old_digest TEXT, old_until DOUBLE PRECISION, models TEXT NOT NULL, classes TEXT NOT NULL,
  priority TEXT NOT NULL, rpm BIGINT, tpm BIGINT, usd_per_day DOUBLE PRECISION, usd_per_month DOUBLE PRECISION,
  created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION, revoked_at DOUBLE PRECISION,
  max_open BIGINT, explains BIGINT NOT NULL DEFAULT 0, team_id BIGINT);

CREATE TABLE crosstie_teams (
  id BIGINT PRIMARY KEY, name TEXT NOT NULL UNIQUE, rpm BIGINT, tpm BIGINT, usd_per_day DOUBLE PRECISION,
  usd_per_month DOUBLE PRECISION, created_at DOUBLE PRECISION NOT NULL);

-- Users with tokens of an issuer: their names in usage, and their teams.
CREATE TABLE crosstie_subjects (id BIGINT PRIMARY KEY, name TEXT NOT NULL, team_id BIGINT);

CREATE TABLE crosstie_usage (
  hour BIGINT NOT NULL, key_id BIGINT NOT NULL, model TEXT NOT NULL, class TEXT NOT NULL, pool TEXT NOT NULL,
  outcome TEXT NOT NULL, code TEXT NOT NULL, requests BIGINT NOT NULL, counted BIGINT NOT NULL,
  input_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, usd DOUBLE PRECISION NOT NULL,
  PRIMARY KEY (hour, key_id, model, class, pool, outcome, code));

-- What budgets are compared with: the usage's dollars by day and by month, so that nobody adds up a month each second.
CREATE TABLE crosstie_spent (
  period TEXT NOT NULL, key_id BIGINT NOT NULL, usd DOUBLE PRECISION NOT NULL, PRIMARY KEY (period, key_id));

-- The last batch of each process that was counted.
CREATE TABLE crosstie_batches (
  process TEXT PRIMARY KEY, sequence BIGINT NOT NULL, written_at DOUBLE PRECISION NOT NULL);
