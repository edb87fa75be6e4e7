package ring

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/cprun/cprun/partition"
)

// slowVisit implements the definition of a visit, from the keys of every visitor's tiles.
func slowVisit(s partition.Shape, owner, h int) visit {
	var want visit
	for j := 1; j < s.Size; j++ {
		var need partition.Range
		for _, t := range partition.Plan(s, (owner+j)%s.Size, owner) {
			need = need.Hull(t.K)
		}
		if need.Len() > 0 {
			want.last = j
		}
		switch {
		case j < h:
			want.before = want.before.Hull(need)
		case j == h:
			want.here = need
		default:
			want.after = want.after.Hull(need)
		}
	}
	return want
}

// A planner returns the same visits as the definition, prepared or not.
func TestVisitsAreTheDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 16))
	for range Draws(400) {
		s := randomShape(rng)
		one := Must(NewPlanner("ring", specOf(s)))
		all := *one
		all.Prepare()
		for rank := range s.Size {
			got, table := one.visits(rank), all.visits(rank)
			for h := range s.Size {
				want := slowVisit(s, (rank-h+s.Size)%s.Size, h)
				if got[h] != want || table[h] != want {
					t.Fatalf("%+v: rank %d in hop %d has %+v, of all %+v, want %+v", s, rank, h, got[h], table[h], want)
				}
			}
		}
	}
}

// A planner of all ranks returns the schedules that each rank makes for itself.
func TestPlannerIsWhatEachRankMakes(t *testing.T) {
	rng := rand.New(rand.NewPCG(17, 18))
	for range Draws(200) {
		s := randomShape(rng)
		for _, algorithm := range Variants {
			all := All(As(algorithm, specOf(s)))
			for rank, got := range all {
				want, err := Make(algorithm, specOf(s), rank)
				if err != nil || !reflect.DeepEqual(got, want) {
					t.Fatalf("%s of %+v: schedule of rank %d is %+v, New makes %+v, %v", algorithm, s, rank, got, want,
						err)
				}
			}
		}
	}
}
