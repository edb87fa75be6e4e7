// Package terminal makes text fit for a terminal and for lines of a log: names of files, values of
// a config and words of other processes may hold control characters, that move the cursor, change
// what a key does or reverse the reading order, and may be of any length.
//
// All that cprun prints goes through Text, Message or a Writer at the place where it is printed;
// names in it go through Name where the text is made, so that a line break in one is seen as such.
package terminal
