-- Length of the cached prefix, in blocks, of one chain of hashes on each worker, and how much of it its device has.
-- KEYS: the workers' block sets, then the host-tier sets of those that have one. ARGV[1]: bytes of a hash. ARGV[2]: the
-- chain, packed. ARGV[3]: one character a worker, '1' where it has a host-tier set.
-- Returns two integers a worker: leading blocks in any tier; leading blocks before the first that the host tier has.
--
-- A worker's set is prefix-closed but for the moments of an eviction (children go before parents), so "block n is held"
-- falls from true to false once: gallop 1, 2, 4, … up to the first miss, then halve between hit and miss. What leaves
-- the device for the host tier goes the same way, so "block n is on the device alone" falls likewise.
local width = tonumber(ARGV[1])
local chain = ARGV[2]
local tiers = ARGV[3]
local total = #chain / width
local call, sub, floor = redis.call, string.sub, math.floor
local answer = {}
local next_host = #tiers

-- The largest n ≤ last such that blocks 1 … n are (wanted = 1) or are not (wanted = 0) members of the set.
local function run_length(key, last, wanted)
  local function in_run(n)
    return call('SISMEMBER', key, sub(chain, (n - 1) * width + 1, n * width)) == wanted
  end
  local hit, miss, step = 0, last + 1, 1
  while hit + step < miss do
    if in_run(hit + step) then
      hit = hit + step
      step = step * 2
    else
      miss = hit + step
    end
  end
  while miss - hit > 1 do
    local middle = floor((hit + miss) / 2)
    if in_run(middle) then
      hit = middle
    else
      miss = middle
    end
  end
  return hit
end

for i = 1, #tiers do
  local length = run_length(KEYS[i], total, 1)
  local device = length
  if sub(tiers, i, i) == '1' then
    next_host = next_host + 1
    device = run_length(KEYS[next_host], length, 0)
  end
  answer[2 * i - 1], answer[2 * i] = length, device
end
return answer
