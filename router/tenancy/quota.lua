-- One request's quota, for all routers: two token buckets and the leases of what runs.
-- KEYS: 1 buckets (hash), 2 leases (sorted set by expiry). Times in ms of this server's clock.
-- ARGV: 1 requests/min, 2 tokens/min, 3 most at once (0: no limit), 4 tokens asked for, 5 lease id, 6 lease ms
-- Returns {1, 0}, or {0, ms to wait, what is exhausted}. A bucket holds a minute's worth; tokens may fall below zero
-- by what is charged afterwards.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local requests_limit, tokens_limit, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local tokens, lease_ms = tonumber(ARGV[4]), tonumber(ARGV[6])
local stored = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local past = math.max(0, now - (tonumber(stored[1]) or now))

local function level(value, limit)
  return math.min(limit, (tonumber(value) or limit) + past * limit / 60000)
end

local requests_left, tokens_left = level(stored[2], requests_limit), level(stored[3], tokens_limit)
if requests_limit > 0 and requests_left < 1 then
  return {0, math.ceil((1 - requests_left) * 60000 / requests_limit), 'requests_per_minute'}
end
-- What is larger than a whole minute's worth goes when the bucket is full, and leaves a debt.
local needed = math.min(tokens, tokens_limit)
if tokens_limit > 0 and tokens_left < needed then
  return {0, math.ceil((needed - tokens_left) * 60000 / tokens_limit), 'tokens_per_minute'}
end
if most > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= most then
    return {0, 1000, 'max_concurrent'}
  end
  redis.call('ZADD', KEYS[2], now + lease_ms, ARGV[5])
  redis.call('PEXPIRE', KEYS[2], lease_ms * 2)
end
-- What has no limit now starts with a full bucket when it gets one.
redis.call('HSET', KEYS[1], 'at', now)
if requests_limit > 0 then redis.call('HSET', KEYS[1], 'requests', requests_left - 1)
else redis.call('HDEL', KEYS[1], 'requests') end
if tokens_limit > 0 then redis.call('HSET', KEYS[1], 'tokens', tokens_left - tokens)
else redis.call('HDEL', KEYS[1], 'tokens') end
redis.call('PEXPIRE', KEYS[1], 3600000)
return {1, 0, ''}
