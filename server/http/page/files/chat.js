// The chat.

export const show = () => {};
export const take = () => {};
