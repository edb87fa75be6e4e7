// Package browser tests the pages of `cprun report` in Chromium. `make test-report` writes the pages and runs the
// tests.
package browser
