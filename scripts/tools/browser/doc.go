// Package browser looks at the pages of `cprun report` in a real browser. `make test-report` makes the
// pages and runs its tests.
package browser
