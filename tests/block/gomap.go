// A Go program with a map that is larger than its memory, and checks every value: gomap ENTRIES ROUNDS. A value
// has 2 KiB. It prints a line for each round, and ends with 3 where a value is not what it should be.
package main

import (
	"fmt"
	"os"
	"strconv"
)

type value [256]uint64

func mix(x uint64) uint64 {
	x = (x ^ x>>31) * 0x7fb5d329728ea185
	x = (x ^ x>>27) * 0x81dadef4bc2dd44d
	return x ^ x>>33
}

func fill(key, round uint64) (made value) {
	for i := range made {
		made[i] = mix(key*1000003 + round*257 + uint64(i))
	}
	return
}

func main() {
	entries, _ := strconv.ParseUint(os.Args[1], 10, 64)
	rounds, _ := strconv.ParseUint(os.Args[2], 10, 64)
	values := make(map[uint64]value)
	for round := uint64(0); round < rounds; round++ {
		for i := uint64(0); i < entries; i++ {
			key := mix(i)
			if round > 0 && values[key] != fill(key, round-1) {
				fmt.Println("gomap: the value of", i, "is wrong in round", round)
				os.Exit(3)
			}
			values[key] = fill(key, round)
		}
		fmt.Println("gomap: round", round)
	}
	for key, found := range values {
		if found != fill(key, rounds-1) {
			fmt.Println("gomap: a value is wrong at the end")
			os.Exit(3)
		}
	}
	fmt.Println("gomap:", len(values), "values are right")
}
