// Package must ends tests that cannot go on, since their set-up failed.
package must

import "testing"

// Have returns a value. A fault ends the test by a panic, which names its line.
func Have[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// Do ends a test after a fault.
func Do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
