# A hash of strings, asked and changed at random. Usage: hash.pl ENTRIES LOOKUPS
use strict;
my ($entries, $lookups) = @ARGV;
my ($state, $sum, %map) = (1, 0);
$map{"key$_"} = "value $_ " . "x" x 20 for 0 .. $entries - 1;
for my $i (1 .. $lookups) {
    $state = ($state * 69069 + 1) % 4294967296;
    my $key = "key" . ($state % $entries);
    $sum = ($sum * 31 + length $map{$key}) % 2147483647;
    $map{$key} .= "y" if $i % 7 == 0;
}
print "$sum\n";
