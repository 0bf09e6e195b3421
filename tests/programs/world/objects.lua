-- Many small tables, read and changed at random. Usage: objects.lua TABLES LOOKUPS
local tables, lookups = tonumber(arg[1]), tonumber(arg[2])
local all, sum, at = {}, 0, 1
for i = 1, tables do all[i] = { i, i * 3 % 1001 } end
for i = 1, lookups do
  at = at * 69069 % 4294967291
  local each = all[at % tables + 1]
  each[2] = (each[2] + i) % 65521
  sum = (sum * 31 + each[2]) % 2147483647
end
print(sum)
