"""How attempts wait in Redis: where the API puts one, and which one a worker takes next.

An attempt waits in the shared queue of its model (the list of the RQ queue) or in the own queue of one
worker, in each by rank. The hash of its RQ job has a `Waiting` as `meta`. `PUT` and `TAKE` are texts of Lua,
each one step of Redis: nobody sees an attempt in two queues or in none. They name keys that they find out on
the way, so Redis must not be a cluster.

Who has the KV of which leading documents is noted under `HOLDERS_KEY` as soon as an attempt is given to a
worker, so that what comes in the next millisecond follows it.
"""

from __future__ import annotations

import hashlib

from pydantic import BaseModel

from jobs.wire import WORKER_KEY, RunRequest, queue_name

SHARED_KEY = "rq:queue:"
OWN_KEY = "longleaf:queue:"
OWNERS_KEY = "longleaf:queues:"
"""By queue name: the workers that have an own queue, some of them gone."""
IDLE_KEY = "longleaf:idle:"
"""By queue name: the workers that found nothing to do, and when."""
HOLDERS_KEY = "longleaf:holders:"
"""By lead: the workers that were given it, and when."""

IDLE_S = 3.0
"""A worker that has asked within so many seconds is given what no other one holds."""
HELD_S = 3600
"""How long `HOLDERS_KEY` lives without use; the database knows for longer."""
MAX_META_BYTES = 16_384
"""More than any `Waiting` of 64 documents has: what is longer was not written here."""
NUM_LOOKED_AT = 256
"""So far into a queue is looked for more over the same documents, or for what has waited too long."""
CHARS_PER_TOKEN = 4
TOKENS_PER_S = 1000
"""Of a worker that has prefilled nothing yet."""
MIN_CHARS = 192
"""Shorter texts have not the tokens of a stored block, so it is the same who reads them."""


class Waiting(BaseModel):
    """What is known of an attempt while it waits."""

    rank: float
    """The lowest goes first."""
    since: float
    """When it was put into a queue, by the clock of Redis."""
    leads: list[str]
    """What its documents begin with, as digests, the whole of them first."""
    num_wanted: int
    """A worker that has one of so many leads, the first ones, spares it most of the prefill."""
    num_chars: int
    """Of its documents."""


def waiting(request: RunRequest, rank: float, since: float) -> Waiting:
    """How an attempt waits. Two have a lead in common where their prompts begin with the same documents."""
    documents = request.documents
    num_chars = [ref.num_chars for ref in documents]
    if not request.spec.reuse or sum(num_chars) < MIN_CHARS:
        return Waiting(rank=rank, since=since, leads=[], num_wanted=0, num_chars=sum(num_chars))
    # One document stands in a prompt without its name, several with theirs.
    digest = hashlib.blake2b(digest_size=16)
    for part in (request.prefix_salt, request.spec.model or "", "one" if len(documents) == 1 else "many"):
        digest.update(part.encode() + b"\0")
    leads = []
    for ref in documents:
        digest.update(f"{ref.text_sha256}\0{ref.name if len(documents) > 1 else ''}\0".encode())
        leads.append(digest.hexdigest())
    num_wanted = sum(sum(num_chars[: n + 1]) * 2 >= sum(num_chars) for n in range(len(documents)))
    return Waiting(rank=rank, since=since, leads=leads[::-1], num_wanted=num_wanted, num_chars=sum(num_chars))


def whole_lead(request: RunRequest) -> str | None:
    """What all documents of a request are, as a digest; None where nobody need hold them."""
    return next(iter(waiting(request, 0.0, 0.0).leads), None)


def shared_key(model: str) -> str:
    return SHARED_KEY + queue_name(model)


def own_key(model: str, worker: str) -> str:
    return f"{OWN_KEY}{queue_name(model)}:{worker}"


def owners_key(model: str) -> str:
    return OWNERS_KEY + queue_name(model)


_COMMON = f"""
local shared, owners, idle =
  '{SHARED_KEY}' .. ARGV[1], '{OWNERS_KEY}' .. ARGV[1], '{IDLE_KEY}' .. ARGV[1]
local now = tonumber(ARGV[2])

local function own(worker) return '{OWN_KEY}' .. ARGV[1] .. ':' .. worker end

local function decoded(raw)
  local is_json, found = pcall(cjson.decode, raw or '')
  return is_json and type(found) == 'table' and found or nil
end

local function is_number(value) return type(value) == 'number' and value == value end

local function is_waiting(found)
  if not (is_number(found.rank) and is_number(found.since) and is_number(found.num_chars)
      and is_number(found.num_wanted) and type(found.leads) == 'table') then return false end
  for _, lead in ipairs(found.leads) do
    if type(lead) ~= 'string' then return false end
  end
  return found.num_wanted <= #found.leads
end

-- An attempt of which nothing is known is due: an error here would stop every worker of the model.
local function waiting(id)
  local key = 'rq:job:' .. id
  local length = redis.pcall('HSTRLEN', key, 'meta')
  local is_short = type(length) == 'number' and length <= {MAX_META_BYTES}
  local found = is_short and decoded(redis.call('HGET', key, 'meta'))
  if found and is_waiting(found) then return found end
  return {{rank = 0, since = 0, leads = {{}}, num_wanted = 0, num_chars = 0}}
end

-- The presence of a worker that takes attempts; nil of one that is gone or draining.
local function presence(worker)
  local found = decoded(redis.call('GET', '{WORKER_KEY}' .. worker))
  return found and found.state ~= 'draining' and found or nil
end

local function claim(leads, worker)
  for _, lead in ipairs(leads) do
    redis.call('ZADD', '{HOLDERS_KEY}' .. lead, now, worker)
    redis.call('EXPIRE', '{HOLDERS_KEY}' .. lead, {HELD_S})
  end
end

-- Behind all of a lower or the same rank.
local function insert(key, id, rank)
  local low, high = 0, redis.call('LLEN', key)
  local length = high
  while low < high do
    local middle = math.floor((low + high) / 2)
    if waiting(redis.call('LINDEX', key, middle)).rank > rank then high = middle else low = middle + 1 end
  end
  if low == length then
    redis.call('RPUSH', key, id)
  else
    redis.call('LINSERT', key, 'BEFORE', redis.call('LINDEX', key, low), id)
  end
end
"""

PUT = (
    _COMMON
    + f"""
local id = ARGV[3]
if redis.call('EXISTS', 'rq:job:' .. id) == 1 then return false end
redis.call('HSET', 'rq:job:' .. id, unpack(ARGV, 5))
redis.call('SADD', 'rq:queues', shared)
local this, holders = waiting(id), cjson.decode(ARGV[4])
local target, least

local function consider(worker)
  local found = presence(worker)
  if not found or type(found.card) ~= 'table' then return end
  local load = redis.call('LLEN', own(worker)) + (found.state == 'idle' and 0 or 1)
  if not least or load < least then target, least = worker, load end
end

for i = 1, this.num_wanted do
  for _, worker in ipairs(redis.call('ZREVRANGE', '{HOLDERS_KEY}' .. this.leads[i], 0, -1)) do
    consider(worker)
  end
  for _, worker in ipairs(holders[i]) do consider(worker) end
  if target then break end
end
if not target then
  for _, worker in ipairs(redis.call('ZREVRANGEBYSCORE', idle, '+inf', now - {IDLE_S})) do
    if presence(worker) and redis.call('LLEN', own(worker)) == 0 then
      target = worker
      break
    end
  end
end
if target then
  redis.call('ZREM', idle, target)
  redis.call('SADD', owners, target)
  claim(this.leads, target)
end
insert(target and own(target) or shared, id, this.rank)
return target or ''
"""
)
"""Save an attempt's RQ job and put it into a queue: of the live worker that has most of its documents and the
least to do, else of an idle one, else the shared one.

Arguments: queue name, time of Redis in seconds, RQ id, JSON of lists of workers that are known to hold each
wanted lead, the fields of the RQ job's hash. Returns the worker, '' for the shared queue, nil where the
attempt was put before.
"""

TAKE = (
    _COMMON
    + f"""
local worker, patience = ARGV[3], tonumber(ARGV[4])
local id, from, whose, lowest

local function offer(candidate, key, owner, rank)
  if candidate and (not lowest or rank < lowest) then
    id, from, whose, lowest = candidate, key, owner, rank
  end
end

local function offer_first(key, owner, bonus)
  local first = redis.call('LINDEX', key, 0)
  if first then offer(first, key, owner, waiting(first).rank - bonus) end
end

-- Seconds that this worker would take for what an attempt's own one has.
local here = presence(worker) or {{}}
local speed = type(here.prefill_tokens_per_s) == 'number' and here.prefill_tokens_per_s or {TOKENS_PER_S}
local function cost(this)
  local is_no_worse = not this.leads[1] or redis.call('ZSCORE', '{HOLDERS_KEY}' .. this.leads[1], worker)
  return is_no_worse and 0 or this.num_chars / {CHARS_PER_TOKEN} / speed
end

-- What has waited too long for a live worker. Nobody has KV sooner than a worker that is making it.
local function offer_late(key, owner, found)
  local made = found.phase == 'prefill' and found.lead
  for _, candidate in ipairs(redis.call('LRANGE', key, 0, {NUM_LOOKED_AT - 1})) do
    local this = waiting(candidate)
    if this.since + patience <= now and (not made or this.leads[1] ~= made) then
      offer(candidate, key, owner, this.rank + patience + cost(this))
    end
  end
end

offer_first(own(worker), worker, patience)
offer_first(shared, '', 0)
for _, other in ipairs(redis.call('SMEMBERS', owners)) do
  local found = presence(other)
  if other == worker then
    -- Its own queue was looked at.
  elseif found then
    offer_late(own(other), other, found)
  elseif redis.call('LLEN', own(other)) == 0 then
    redis.call('SREM', owners, other)
  else
    offer_first(own(other), other, 0)
  end
end
if not id then
  redis.call('ZADD', idle, now, worker)
  return false
end

redis.call('ZREM', idle, worker)
redis.call('LREM', from, 1, id)
redis.call('RPUSH', shared .. ':intermediate', id)
local this = waiting(id)
claim(this.leads, worker)
if whose ~= worker and this.leads[1] then
  for _, other in ipairs(redis.call('LRANGE', from, 0, {NUM_LOOKED_AT - 1})) do
    local follower = waiting(other)
    if follower.leads[1] == this.leads[1] then
      redis.call('LREM', from, 1, other)
      insert(own(worker), other, follower.rank)
      redis.call('SADD', owners, worker)
    end
  end
end
return {{id, whose, presence(whose) and 1 or 0}}
"""
)
"""Take the next attempt for a worker, into the intermediate list of the RQ queue.

It is the lowest rank among the first of its own queue, of the shared one, of those that gone workers have
left, and of those that have waited for another worker for longer than `patience` seconds. The own queue
counts as so many seconds older: for so long others may be passed for the sake of what this worker holds.
Those of another worker count as so much younger, and by what their prefill would take here: they are taken
where that worker is behind by more, or this one has nothing else. What waits in the same queue over the same
documents comes along.

Arguments: queue name, time of Redis in seconds, worker, patience in seconds. Returns the RQ id, the worker
whose queue it was in ('' for the shared one), and 1 where that one takes attempts; nil where there is
nothing, and then the worker counts as idle.
"""
