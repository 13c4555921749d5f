-- Length of the cached prefix, in blocks, of one chain of hashes on each worker.
-- KEYS: the workers' block sets. ARGV[1]: hash bytes. ARGV[2]: the chain, packed. Returns one integer a key.
--
-- A worker's set is prefix-closed but for the moments of an eviction (children go before parents), so "block n is
-- held" falls from true to false once: gallop 1, 2, 4, … up to the first miss, then halve between hit and miss.
local width = tonumber(ARGV[1])
local chain = ARGV[2]
local total = #chain / width
local lengths = {}

for i, key in ipairs(KEYS) do
  local function held(n)
    return redis.call('SISMEMBER', key, string.sub(chain, (n - 1) * width + 1, n * width)) == 1
  end
  local hit, miss, step = 0, total + 1, 1
  while hit + step < miss do
    if held(hit + step) then
      hit = hit + step
      step = step * 2
    else
      miss = hit + step
    end
  end
  while miss - hit > 1 do
    local middle = math.floor((hit + miss) / 2)
    if held(middle) then
      hit = middle
    else
      miss = middle
    end
  end
  lengths[i] = hit
end
return lengths
