// Package browser looks at the pages of `cprun report` in Chromium. `make test-report` writes the
// pages and runs its tests.
package browser
