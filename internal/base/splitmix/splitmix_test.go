package splitmix

import "testing"

// The seed 1234567 gives the numbers of the reference code.
func TestReference(t *testing.T) {
	for i, want := range []uint64{6457827717110365317, 3203168211198807973, 9817491932198370423} {
		if got := Mix(1234567 + Step(uint64(i)+1)); got != want {
			t.Errorf("number %d is %d, want %d", i, got, want)
		}
	}
}
