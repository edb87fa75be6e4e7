// Package browser tests the pages of `cprun report` in Chromium: figures, keyboard, widths and screenshots.
// `make test-report` writes the pages and runs the tests.
package browser
