// Objects, strings and maps of V8. Usage: objects.js OBJECTS
const count = Number(process.argv[2]);
const all = Array.from({ length: count }, (_, i) => ({ id: i, name: `n${(i * 7919) % count}`, score: (i * 31) % 997 }));
const byName = new Map(all.map((each) => [each.name, each]));
all.sort((a, b) => a.score - b.score || a.id - b.id);
let sum = 0;
for (let i = 0; i < count; i += 3) sum = (sum * 31 + byName.get(`n${i}`).id + all[i].score) % 2147483647;
console.log(sum, JSON.parse(JSON.stringify(all.slice(0, count / 10))).length);
