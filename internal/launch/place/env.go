package place

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// maxText bounds a variable whose text is kept, such as a name. Host lists have a bound of their own.
const maxText = 1024

// env reads variables. One that is set to nothing counts as not set, as launchers and their users have it.
type env struct {
	get func(name string) string
}

// text returns a variable's text, "" where it is not set.
func (e env) text(name string) string { return strings.TrimSpace(e.get(name)) }

// has reports whether all of these are set.
func (e env) has(names ...string) bool {
	for _, name := range names {
		if e.text(name) == "" {
			return false
		}
	}
	return true
}

// first returns the first of these variables that is set, and its text.
func (e env) first(names ...string) (name, text string) {
	for _, name := range names {
		if text := e.text(name); text != "" {
			return name, text
		}
	}
	return "", ""
}

// word returns the text of a variable that names something: printable, and not longer than names are.
func (e env) word(name string) (string, error) {
	v := e.text(name)
	if v != terminal.Name(v) || len(v) > maxText || strings.ContainsAny(v, " \t") {
		return "", fmt.Errorf("%s is no name; unset it, or start this through its launcher", show(name, v))
	}
	return v, nil
}

// number returns a variable that is a number from lo to hi.
func (e env) number(name string, lo, hi int) (int, error) {
	v := e.text(name)
	if v == "" {
		return 0, fmt.Errorf("%s is not set; start this through its launcher, which sets it, or take its other "+
			"variables away", name)
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < lo || n > hi {
		return 0, fmt.Errorf("%s: want a number from %d to %d; set it right, or unset it", show(name, v), lo, hi)
	}
	return n, nil
}

// guess returns a number that only serves a note, or makes a message better; 0 where it is none.
func (e env) guess(name string) int {
	n, err := strconv.Atoi(e.text(name))
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// numbers reads several numbers, up to the first fault.
type numbers struct {
	env env
	err error
}

func (n *numbers) get(name string, lo, hi int) int {
	if n.err != nil {
		return 0
	}
	v, err := n.env.number(name, lo, hi)
	n.err = err
	return v
}

// show returns a variable as messages have it.
func show(name, value string) string { return name + "=" + terminal.Name(value) }

// set is show for a number.
func set(name string, value int) string { return name + "=" + strconv.Itoa(value) }
