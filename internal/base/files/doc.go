// Package files is the one way in which cprun opens files to read, and makes those of a run.
//
// What is read may be anybody's: Open refuses all but regular files without waiting for them, and
// Read has a bound. What is written lies in a directory that is held open as an os.Root, so that no
// link in it leads elsewhere; files get names of their own that did not exist, and their real name
// when they are whole.
package files
