package command

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/machine"
)

func TestCardsThatAreAlike(t *testing.T) {
	var list []machine.GPU
	for i, name := range []string{"A", "A", "A", "B", "A", "A"} {
		list = append(list, machine.GPU{Ordinal: i, Name: name, Memory: 1 << 30})
	}
	var got []string
	for _, f := range cards(list) {
		got = append(got, f.what)
	}
	if want := []string{"GPUs 0 to 2", "GPU 3", "GPUs 4 to 5"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
